"""Measure procrastinate with settings for throughput: its psycopg connector, twenty jobs at a time."""

import asyncio
import json
import os
import sys
from collections import Counter
from statistics import quantiles
from time import perf_counter
from typing import Any

from procrastinate import App, PsycopgConnector

SINGLES = 500
ROUNDS = 100
WARM_UP = 10
CONCURRENCY = 20
CONNECTIONS = 10
PATIENCE_S = 900.0
STILL_S = 0.05  # the time after which a worker is idle again
PAYLOAD = "x" * 100
DONE = """
select case when not exists (select from procrastinate_jobs where status in ('todo', 'doing')) then clock_timestamp() end as at
"""
FIRST_CLAIM = "select min(at) as at from procrastinate_events where type = 'started'"


class Runs:
    """Records in this process how often each job ran, and when the latest job started."""

    def __init__(self, expected: int) -> None:
        self.expected = expected
        self.count: Counter[int] = Counter()
        self.all_ran = asyncio.Event()
        self.begun: asyncio.Queue[float] = asyncio.Queue()

    async def nothing(self, number: int, payload: str) -> None:
        del payload
        self.count[number] += 1
        if len(self.count) == self.expected:
            self.all_ran.set()

    async def begin(self, payload: str) -> None:
        del payload
        self.begun.put_nowait(perf_counter())


async def measure(url: str, jobs: int, parts: set[str]) -> dict[str, float]:
    """Measure these parts in an empty database. All jobs are drained before latency is measured."""
    app = App(connector=PsycopgConnector(conninfo=url, min_size=CONNECTIONS, max_size=CONNECTIONS))
    runs = Runs(jobs + SINGLES)
    nothing = app.task(name="nothing")(runs.nothing)
    begin = app.task(name="begin")(runs.begin)
    found = {}
    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        if parts & {"send", "drain"}:
            found = await sent(nothing, jobs)
            await app.connector.execute_query_async("analyze")
        if parts & {"drain", "latency"}:
            async with asyncio.TaskGroup() as group:
                worker = group.create_task(served(app))
                if found:
                    found["drain_per_s"] = (jobs + SINGLES) / await drained(runs, app)
                if "latency" in parts:
                    found |= await latencies(runs, begin)
                worker.cancel()
    return found


async def sent(nothing: Any, jobs: int) -> dict[str, float]:
    """Measure how fast jobs are sent, both one at a time and all at once."""
    began = perf_counter()
    for number in range(SINGLES):
        await nothing.defer_async(number=number, payload=PAYLOAD)
    single_s = perf_counter() - began
    began = perf_counter()
    await nothing.batch_defer_async(
        *({"number": SINGLES + number, "payload": PAYLOAD} for number in range(jobs))
    )
    return {"single_per_s": SINGLES / single_s, "bulk_per_s": jobs / (perf_counter() - began)}


async def served(app: Any) -> None:
    """Run one worker until it is cancelled."""
    await app.run_worker_async(concurrency=CONCURRENCY, install_signal_handlers=False)


async def drained(runs: Runs, app: Any) -> float:
    """Return the seconds from the first claim until no job is left, by the server's clock. The clock is read only at the end."""
    await runs.all_ran.wait()
    ask = app.connector.execute_query_one_async
    while (done_at := (await ask(DONE))["at"]) is None:  # noqa: ASYNC110 - it is seen in the database only
        await asyncio.sleep(0.005)
    took = done_at - (await ask(FIRST_CLAIM))["at"]
    if set(runs.count.values()) != {1}:
        raise SystemExit(f"of {runs.expected} jobs {sum(runs.count.values()) - runs.expected} ran again")
    return float(took.total_seconds())


async def latencies(runs: Runs, begin: Any) -> dict[str, float]:
    """Return percentiles of the milliseconds from the call to `send` to the first line of the job, for an idle worker."""
    waits_ms = []
    for _ in range(WARM_UP + ROUNDS):
        await asyncio.sleep(STILL_S)
        asked_at = perf_counter()
        await begin.defer_async(payload=PAYLOAD)
        waits_ms.append((await runs.begun.get() - asked_at) * 1_000)
    percentiles = quantiles(waits_ms[WARM_UP:], n=100)
    return {"latency_p50_ms": percentiles[49], "latency_p99_ms": percentiles[98]}


if __name__ == "__main__":
    measured = measure(os.environ["DATABASE_URL"], int(sys.argv[1]), {*sys.argv[2:]})
    print(json.dumps(asyncio.run(asyncio.wait_for(measured, timeout=PATIENCE_S))))
