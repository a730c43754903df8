"""Measure pgqueuer with settings for throughput: asyncpg, uvloop, one connection per manager, batches of 500."""

import asyncio
import json
import os
import sys
from collections import Counter
from statistics import quantiles
from time import perf_counter
from typing import Any

import asyncpg
import uvloop
from pgqueuer import PgQueuer
from pgqueuer.queries import Queries

SINGLES = 500
ROUNDS = 100
WARM_UP = 10
BATCH = 500  # how many jobs a worker claims, or completes, at once
PATIENCE_S = 900.0
STILL_S = 0.05  # the time after which a worker is idle again
PAYLOAD = b"x" * 100
DONE = "select clock_timestamp() where not exists (select from pgqueuer)"
FIRST_CLAIM = "select min(created) from pgqueuer_log where status = 'picked'"


class Runs:
    """Records in this process how often each job ran, and when the latest job started."""

    def __init__(self, expected: int) -> None:
        self.expected = expected
        self.count: Counter[int] = Counter()
        self.all_ran = asyncio.Event()
        self.begun: asyncio.Queue[float] = asyncio.Queue()

    async def nothing(self, job: Any) -> None:
        self.count[job.id] += 1
        if len(self.count) == self.expected:
            self.all_ran.set()

    async def begin(self, job: Any) -> None:
        del job
        self.begun.put_nowait(perf_counter())


async def measure(url: str, jobs: int, parts: set[str]) -> dict[str, float]:
    """Measure these parts in an empty database. All jobs are drained before latency is measured."""
    sender, served = await asyncpg.connect(url), await asyncpg.connect(url)
    queries = Queries.from_asyncpg_connection(sender)
    await queries.install()
    found = {}
    if parts & {"send", "drain"}:
        found = await sent(queries, jobs)
        await sender.execute("analyze")
    runs = Runs(jobs + SINGLES)
    worker = PgQueuer.from_asyncpg_connection(served)
    worker.entrypoint("nothing")(runs.nothing)
    worker.entrypoint("begin")(runs.begin)
    if parts & {"drain", "latency"}:
        async with asyncio.TaskGroup() as group:
            group.create_task(worker.run(batch_size=BATCH))
            if found:
                found["drain_per_s"] = (jobs + SINGLES) / await drained(runs, sender)
            if "latency" in parts:
                found |= await latencies(runs, queries)
            worker.shutdown.set()
    await sender.close()
    await served.close()
    return found


async def sent(queries: Queries, jobs: int) -> dict[str, float]:
    """Measure how fast jobs are sent, both one at a time and all at once."""
    began = perf_counter()
    for _ in range(SINGLES):
        await queries.enqueue("nothing", PAYLOAD)
    single_s = perf_counter() - began
    began = perf_counter()
    await queries.enqueue(["nothing"] * jobs, [PAYLOAD] * jobs, [0] * jobs)
    return {"single_per_s": SINGLES / single_s, "bulk_per_s": jobs / (perf_counter() - began)}


async def drained(runs: Runs, sender: Any) -> float:
    """Return the seconds from the first claim until no job is left, by the server's clock. The clock is read only at the end."""
    await runs.all_ran.wait()
    while (done_at := await sender.fetchval(DONE)) is None:  # noqa: ASYNC110 - it is seen in the database only
        await asyncio.sleep(0.005)
    took = done_at - await sender.fetchval(FIRST_CLAIM)
    if set(runs.count.values()) != {1}:
        raise SystemExit(f"of {runs.expected} jobs {sum(runs.count.values()) - runs.expected} ran again")
    return float(took.total_seconds())


async def latencies(runs: Runs, queries: Any) -> dict[str, float]:
    """Return percentiles of the milliseconds from the call to `send` to the first line of the job, for an idle worker."""
    waits_ms = []
    for _ in range(WARM_UP + ROUNDS):
        await asyncio.sleep(STILL_S)
        asked_at = perf_counter()
        await queries.enqueue("begin", PAYLOAD)
        waits_ms.append((await runs.begun.get() - asked_at) * 1_000)
    percentiles = quantiles(waits_ms[WARM_UP:], n=100)
    return {"latency_p50_ms": percentiles[49], "latency_p99_ms": percentiles[98]}


if __name__ == "__main__":
    measured = measure(os.environ["DATABASE_URL"], int(sys.argv[1]), {*sys.argv[2:]})
    print(json.dumps(uvloop.run(asyncio.wait_for(measured, timeout=PATIENCE_S))))
