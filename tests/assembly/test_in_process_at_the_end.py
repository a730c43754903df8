"""Test an in-process worker whose program ends: asyncio.run cancels every task of the loop, and no leased task is lost."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import UUID

import pytest

from everbeat import App, TaskState

pytestmark = pytest.mark.usefixtures("migrated")
Run = Callable[..., subprocess.CompletedProcess[str]]

PROGRAM = """
import asyncio, logging, os, time
from everbeat import App, TaskState

logging.basicConfig(level=logging.INFO)
app = App(os.environ["PROGRAM_URL"], schema=os.environ["PROGRAM_SCHEMA"], on_crash=os.environ["PROGRAM_ON_CRASH"])

@app.task
async def plain() -> None:
    await asyncio.sleep(600)  # longer than the program lives

@app.task
async def gathering() -> None:
    await asyncio.gather(asyncio.sleep(600), asyncio.sleep(600))  # longer than the program lives

@app.task
async def tidy() -> None:
    try:
        await asyncio.sleep(600)  # longer than the program lives
    finally:
        await asyncio.sleep(0.1)  # what clean-up may take
        print("tidied up", flush=True)

@app.task
def threaded() -> None:
    time.sleep(600)  # longer than the program lives

@app.task(run_in="process")
def processed() -> None:
    time.sleep(600)  # longer than the program lives

async def work():
    return asyncio.create_task(app.arun_worker(process_concurrency=1, grace="10m"))

async def all_run():
    sent = [await task.asend() for task in (plain, gathering, tidy, threaded, processed)]
    for handle in sent:
        while (await handle.ainfo()).state is not TaskState.RUNNING:
            await asyncio.sleep(0.02)  # between two looks from outside
        print("sent", handle.id, flush=True)

async def main() -> None:
{body}

if __name__ == "__main__":
    asyncio.run(main())
    print("ended", flush=True)
"""


@pytest.fixture
def app(database_url: str, schema: str) -> Iterator[App]:
    opened = App(database_url, schema=schema)
    opened.migrate()
    yield opened
    opened.close()


@pytest.fixture
def run(database_url: str, schema: str, tmp_path: Path) -> Run:
    def run(body: str, on_crash: str = "fail") -> subprocess.CompletedProcess[str]:
        program = tmp_path / "program.py"
        program.write_text(PROGRAM.replace("{body}", textwrap.indent(body, "    ")))
        return subprocess.run(
            [sys.executable, str(program)],
            env={
                **os.environ,
                "PROGRAM_URL": database_url,
                "PROGRAM_SCHEMA": schema,
                "PROGRAM_ON_CRASH": on_crash,
            },
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )

    return run


def assert_quiet(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "ended"
    for word in ("Traceback", "crashed", "CriticalEnded", "CRITICAL", "ERROR"):
        assert word not in done.stderr, done.stderr


def sent(done: subprocess.CompletedProcess[str]) -> list[UUID]:
    return [UUID(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("sent ")]


def test_tasks_of_an_in_process_worker_follow_their_policy_when_asyncio_run_ends(
    app: App, run: Run
) -> None:  # D7 J1
    done = run("worker = await work()\nawait all_run()", "retry")
    assert_quiet(done)
    assert "tidied up" in done.stdout
    assert "loop_ends running=stopped" in done.stderr
    for task_id in sent(done):
        info = app.handle(task_id).info()
        outcomes = [attempt.outcome for attempt in info.attempts]
        # A thread continued until the process ended, so its next run waits for a recovery.
        expected = (TaskState.RUNNING, []) if info.name == "threaded" else (TaskState.PENDING, ["RELEASED"])
        assert (info.name, (info.state, outcomes), info.retry_count) == (info.name, expected, 0)
        assert info.recoveries == ()
    assert len(sent(done)) == 5
    (supervisor,) = app.list_supervisors()
    # The worker sent heartbeats for the thread until the program ended, and other trees notice its end like any death.
    assert (supervisor.ended_how, supervisor.session_lost) == (None, True)


@pytest.mark.parametrize(
    "seconds", [0.0, *(pytest.param(later, marks=pytest.mark.long) for later in (0.05, 0.15, 0.5)), 1.0]
)
def test_a_program_that_ends_while_its_worker_starts_prints_no_errors(
    app: App, run: Run, seconds: float
) -> None:
    program = f"worker = await work()\nawait asyncio.sleep({seconds})"  # the program ends after this time
    done = run(program)
    assert_quiet(done)
    assert app.list_active_workers() == []
    assert [supervisor.ended_how for supervisor in app.list_supervisors()] in ([], ["left"])


def test_a_program_that_raises_stops_its_tasks_and_shows_only_its_own_error(app: App, run: Run) -> None:
    done = run("worker = await work()\nawait all_run()\nraise ValueError('of the program')")
    assert done.returncode == 1
    words = ("ERROR", "CRITICAL", "Exception ignored", "Task exception")
    others = [line for line in done.stderr.splitlines() if line.startswith(words)]
    assert others
    assert all("task_failure" in line and "code=WORKER_STOPPED" in line for line in others), done.stderr
    assert "ValueError: of the program" in done.stderr
    infos = [app.handle(task_id).info() for task_id in sent(done)]
    assert {(info.state, info.error and info.error.code) for info in infos} == {
        (TaskState.FAILED, "WORKER_STOPPED")
    }


def test_tasks_of_a_worker_whose_parts_the_program_cancels_are_recovered(app: App, run: Run) -> None:
    done = run(
        "worker = await work()\nawait all_run()\n"
        "for task in asyncio.all_tasks() - {asyncio.current_task()}: task.cancel()\n"
        "await asyncio.wait({worker})\nassert worker.cancelled()"
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("left_to_recovery") == 1

    @app.task
    def other() -> None: ...

    thread = threading.Thread(target=app.run_worker)
    thread.start()
    end = time.monotonic() + 20
    while any(app.handle(task_id).info().state is TaskState.RUNNING for task_id in sent(done)):
        assert time.monotonic() < end
        time.sleep(0.05)  # only the database shows the awaited change
    app.stop_worker()
    thread.join(30)
    assert all(len(app.handle(task_id).info().recoveries) == 1 for task_id in sent(done))
