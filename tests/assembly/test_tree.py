"""Test the processes of an `everbeat worker`: they run tasks, stop in good order and report why they cannot start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everbeat import App

SUPERVISE = "import sys; from everbeat.assembly.tree import supervise; supervise(sys.argv[1], overrides=eval(sys.argv[2]))"
SHOP = """
import os
from everbeat import App, QueueConfig, WorkerConfig

app = App(worker=WorkerConfig(processes=2, queues=["default", "mail"]), schema={schema!r})

@app.task
async def on_the_loop() -> int:
    return os.getpid()

@app.task
def in_a_thread() -> int:
    return os.getpid()

@app.task(run_in="process")
def in_a_process() -> int:
    return os.getpid()
"""


class Shop:
    """A folder with a program, and the worker trees started there."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.url = url
        self.processes: list[subprocess.Popen[str]] = []

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text, encoding="utf-8")

    def start(self, locator: str, url: str | None = None, **overrides: Any) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", SUPERVISE, locator, repr(overrides)],
            cwd=self.folder,
            env=os.environ | {"EVERBEAT_DATABASE_URL": url or self.url},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process

    def refusal(self, locator: str, **options: Any) -> str:
        """Return the output of a tree that cannot start."""
        process = self.start(locator, **options)
        _, said = process.communicate(timeout=60)
        assert process.returncode == 1, said
        return said


@pytest.fixture
def shop(tmp_path: Path, database_url: str) -> Iterator[Shop]:
    opened = Shop(tmp_path, database_url)
    yield opened
    for process in opened.processes:
        process.kill()
        process.communicate()


@pytest.mark.story
def test_a_worker_tree_runs_tasks_of_all_modes_and_ends_at_sigterm(  # B9, B12
    shop: Shop, database_url: str, schema: str
) -> None:
    shop.write("shop.py", SHOP.format(schema=schema))
    tree = shop.start("shop:app", process_concurrency=1)
    app = App(database_url, schema=schema)
    names = ("on_the_loop", "in_a_thread", "in_a_process")
    pids = {name: app.send_by_name(name).result(timeout=60) for name in names}
    workers = app.list_active_workers()
    while len(workers) < 2:
        time.sleep(0.05)  # the second worker process is still starting
        workers = app.list_active_workers()
    assert {pids["on_the_loop"], pids["in_a_thread"]} <= {worker.pid for worker in workers}
    assert pids["in_a_process"] not in {worker.pid for worker in workers} | {tree.pid, os.getpid()}
    assert {worker.tasks for worker in workers} == {tuple(sorted(names))}
    assert {worker.queues for worker in workers} == {("default", "mail")}
    odd = app.send_by_name("on_the_loop", {}, queue="odd")
    assert odd.info().waiting_because == "no live worker serves queue 'odd'"
    tree.send_signal(signal.SIGTERM)
    _, said = tree.communicate(timeout=60)
    assert tree.returncode == 0, said
    assert app.list_active_workers() == []
    assert [supervisor.ended_how for supervisor in app.list_supervisors()] == ["left"]
    app.close()


@pytest.mark.story
def test_a_worker_tree_keeps_its_embedded_database_running_until_it_ends(shop: Shop, schema: str) -> None:
    shop.write("shop.py", SHOP.format(schema=schema))
    tree = shop.start("shop.py", url="embedded", processes=1)
    app = App(f"embedded:{shop.folder / '.everbeat'}", schema=schema)
    assert app.send_by_name("on_the_loop").result(timeout=60) > 0
    app.close()
    tree.send_signal(signal.SIGTERM)
    _, said = tree.communicate(timeout=60)
    assert tree.returncode == 0, said
    assert "supervisor_end_not_recorded" not in said
    again = App(f"embedded:{shop.folder / '.everbeat'}", schema=schema)
    assert [supervisor.ended_how for supervisor in again.list_supervisors()] == ["left"]
    again.close()


@pytest.mark.story
@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import nothing_of_this_name", ["Importing 'shop' failed", "nothing_of_this_name"]),
        ("app = 5", ["is of type int, not an App"]),
        ("from everbeat import App\napp = App()", ["has no tasks"]),
        (
            "from everbeat import App\napp = App('mysql://db')\n@app.task\ndef f(): ...",
            ["everbeat supports only PostgreSQL"],
        ),
        (
            "from everbeat import App\napp = App('postgresql://u:secret@127.0.0.1:1/db')\n@app.task\ndef f(): ...",
            ["cannot be reached", "postgresql://u@127.0.0.1:1/db"],
        ),
        (
            "from everbeat import App, RecoveryConfig\napp = App(recovery=RecoveryConfig(check_interval_ms=5))",
            ["shop.py:2", "check_interval_ms"],
        ),
    ],
)
def test_a_worker_tree_that_cannot_start_says_why(shop: Shop, source: str, said: list[str]) -> None:
    shop.write("shop.py", source)
    text = shop.refusal("shop:app")
    for each in said:
        assert each in text
    assert "secret" not in text


@pytest.mark.story
def test_invalid_worker_overrides_are_refused_before_the_tree_starts(shop: Shop) -> None:
    assert "WorkerConfig.processes" in shop.refusal("nowhere:app", processes=0)
    assert "no module 'nowhere'" in shop.refusal("nowhere:app")
