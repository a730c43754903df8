// graphile-worker with settings for throughput: the local queue and the batched completions of its own performance test.

import { EventEmitter, once } from "node:events";
import { performance } from "node:perf_hooks";
import { setTimeout as pause } from "node:timers/promises";

import worker from "graphile-worker";

const SINGLES = 500;
const ROUNDS = 100;
const WARM_UP = 10;
const CONCURRENCY = 24;
const PATIENCE_MS = 900_000;
const STILL_MS = 50; // after which a worker is idle again
const PAYLOAD = "x".repeat(100);

// It deletes finished jobs, so only this process knows when it first claimed.
const events = new EventEmitter();
let firstClaimAt = 0;
events.on("worker:getJob:start", () => (firstClaimAt ||= performance.now()));

const preset = {
  worker: {
    connectionString: process.env.DATABASE_URL,
    concurrentJobs: CONCURRENCY,
    maxPoolSize: CONCURRENCY + 1,
    localQueue: { size: 500, refetchDelay: { durationMs: 10 } },
    completeJobBatchDelay: 0,
    failJobBatchDelay: 0,
    events,
    logger: new worker.Logger(() => (level, message) => {
      if (level === "error" || level === "warning") console.error(message);
    }),
  },
};

/** Record in this process how often each job ran, and report the start of each `begin`. */
function newRuns(expected) {
  const count = new Map();
  const told = new EventTarget();
  const runs = {
    count,
    expected,
    allRan: once(told, "all"),
    nextBegun: () => once(told, "begun").then(([event]) => event.detail),
    tasks: {
      nothing: async ({ number }) => {
        count.set(number, (count.get(number) ?? 0) + 1);
        if (count.size === expected) told.dispatchEvent(new Event("all"));
      },
      begin: async () => {
        told.dispatchEvent(new CustomEvent("begun", { detail: performance.now() }));
      },
    },
  };
  return runs;
}

/** Return the seconds from the first claim until no job is left; the database is read only at the end. */
async function drained(runs, query) {
  await runs.allRan;
  while ((await query("select exists (select from graphile_worker.jobs) as left")).rows[0].left) await pause(5);
  const tookMs = performance.now() - firstClaimAt;
  const total = [...runs.count.values()].reduce((sum, times) => sum + times, 0);
  if (total !== runs.expected) throw new Error(`of ${runs.expected} jobs ${total - runs.expected} ran again`);
  return tookMs / 1000;
}

/** Return the milliseconds from the call of addJob to the first line of the job, for an idle worker, sorted. */
async function latencies(runs, utils) {
  const waits = [];
  for (let round = 0; round < WARM_UP + ROUNDS; round++) {
    await pause(STILL_MS);
    const begun = runs.nextBegun();
    const askedAt = performance.now();
    await utils.addJob("begin", { payload: PAYLOAD });
    waits.push((await begun) - askedAt);
  }
  return waits.slice(WARM_UP).sort((one, other) => one - other);
}

/** Measure how fast jobs are sent, one at a time and at once. */
async function sent(utils, jobs) {
  let began = performance.now();
  for (let number = 0; number < SINGLES; number++) await utils.addJob("nothing", { number, payload: PAYLOAD });
  const singleS = (performance.now() - began) / 1000;
  began = performance.now();
  await utils.addJobs(
    Array.from({ length: jobs }, (_, number) => ({
      identifier: "nothing",
      payload: { number: SINGLES + number, payload: PAYLOAD },
    })),
  );
  const bulkS = (performance.now() - began) / 1000;
  return { single_per_s: SINGLES / singleS, bulk_per_s: jobs / bulkS };
}

/** Measure these parts in an empty database. All jobs are drained before the latency is measured. */
async function measure(jobs, parts) {
  const wants = (...names) => names.some((name) => parts.includes(name));
  const utils = await worker.makeWorkerUtils({ preset });
  const query = (text) => utils.withPgClient((client) => client.query(text));
  await utils.migrate();
  const found = wants("send", "drain") ? await sent(utils, jobs) : {};
  await query("analyze");
  if (wants("drain", "latency")) {
    const runs = newRuns(jobs + SINGLES);
    const runner = await worker.run({ preset, taskList: runs.tasks, noHandleSignals: true, crontab: "" });
    if (wants("send", "drain")) found.drain_per_s = (jobs + SINGLES) / (await drained(runs, query));
    if (wants("latency")) {
      const waits = await latencies(runs, utils);
      found.latency_p50_ms = waits[Math.ceil(waits.length * 0.5) - 1];
      found.latency_p99_ms = waits[Math.ceil(waits.length * 0.99) - 1];
    }
    await runner.stop();
  }
  await utils.release();
  return found;
}

setTimeout(() => {
  console.error(`not done within ${PATIENCE_MS / 1000} s`);
  process.exit(1);
}, PATIENCE_MS).unref();
console.log(JSON.stringify(await measure(Number(process.argv[2]), process.argv.slice(3))));
