"""Measure one installation of everbeat, of any version. The installation's interpreter runs this program, which uses only the public API.

Arguments: the number of tasks, and `drain` or `latency`. DATABASE_URL is the libpq URL of an empty database. WORKER_SETTINGS contains the
changed settings of `WorkerConfig` as JSON.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import quantiles
from typing import Any

import psycopg

from everbeat import App, WorkerConfig

CHUNK = 10_000
ROUNDS = 200
WARM_UP = 10
PATIENCE_S = 300.0
PAYLOAD = "x" * 100
SETTINGS = json.loads(os.environ["WORKER_SETTINGS"])

app = App(os.environ["DATABASE_URL"], worker=WorkerConfig(**SETTINGS))


@app.task
async def nothing(number: int, payload: str = PAYLOAD) -> int:
    """Return `number`. The arguments take a hundred bytes."""
    del payload
    return number


@app.task
async def begun() -> float:
    """Return the time at which this code started, by the clock that all processes on the machine share."""
    return time.monotonic()


@contextmanager
def working() -> Iterator[None]:
    """Start one worker process, which claims tasks until the block ends."""
    here = Path(__file__)
    command = [sys.executable, "-m", "everbeat", "worker", f"{here.stem}:app", "--log-level", "warning"]
    tree = subprocess.Popen(command, cwd=here.parent, stdout=sys.stderr)
    try:
        wait_until(lambda: tree.poll() is not None or app.list_active_workers())
        if tree.poll() is not None:
            raise SystemExit("the worker did not start")
        yield
        tree.terminate()
        tree.wait()
    finally:
        tree.kill()
        tree.wait()


def wait_until(look: Any, every_s: float = 0.05) -> None:
    """Wait until `look` returns a true value."""
    give_up_at = time.monotonic() + PATIENCE_S
    while not look():
        if time.monotonic() > give_up_at:
            raise SystemExit("this takes too long")
        time.sleep(every_s)


def drained(tasks: int) -> dict[str, float]:
    """Return the tasks per second from the first start to the last end, by the server's clock. Fails unless each task ran exactly once."""
    app.pause_queue("default")
    for first in range(0, tasks, CHUNK):
        app.send_many(nothing.call(number) for number in range(first, min(tasks, first + CHUNK)))
    with psycopg.connect(os.environ["DATABASE_URL"], autocommit=True) as connection:
        connection.execute("vacuum analyze everbeat.tasks, everbeat.attempts")
        row = connection.execute("select pg_has_role(current_user, 'pg_checkpoint', 'usage')").fetchone()
        if row and row[0]:
            connection.execute("checkpoint")
        with working():
            app.resume_queue("default")
            ended = "select from everbeat.tasks where state in ('PENDING', 'CLAIMED', 'RUNNING') limit 1"
            wait_until(lambda: connection.execute(ended).fetchone() is None, every_s=0.1)
        found = connection.execute(
            "select count(*) filter (where state = 'COMPLETED' and result::text = args->>'number'), "
            "(select count(*) from everbeat.attempts where outcome = 'COMPLETED'), (select count(*) from everbeat.attempts), "
            "extract(epoch from max(completed_at) - min(started_at))::float8 from everbeat.tasks"
        ).fetchone()
    assert found is not None
    if tuple(found[:3]) != (tasks, tasks, tasks):
        raise SystemExit(f"of {tasks} tasks {found[0]} completed, in {found[2]} attempts")
    return {"drain_per_s": tasks / found[3]}


def latencies() -> dict[str, float]:
    """Return percentiles of the milliseconds from the call to `send` to the first line of the task, for an idle worker."""
    with working():
        for _ in range(WARM_UP):
            begun.send().result(timeout=PATIENCE_S)
        waits_ms = []
        for _ in range(ROUNDS):
            asked_at = time.monotonic()
            waits_ms.append((begun.send().result(timeout=PATIENCE_S) - asked_at) * 1_000)
    percentiles = quantiles(waits_ms, n=100)
    return {"latency_p50_ms": percentiles[49], "latency_p99_ms": percentiles[98]}


def main() -> None:
    """Measure one part."""
    tasks, part = int(sys.argv[1]), sys.argv[2]
    app.migrate()
    found = drained(tasks) if part == "drain" else latencies()
    app.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
