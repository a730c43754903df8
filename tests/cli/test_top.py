"""`everbeat top` shows trees, rates and recoveries, and follows them at a terminal until Ctrl-C."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

from msgspec.structs import replace

from everbeat import App
from everbeat.cli.top import frame
from everbeat.client.database_access import database_of
from everbeat.client.overview import Overview, overview
from everbeat.store import series
from tests.cli.conftest import Command
from tests.client.conftest import app, db
from tests.store.conftest import StoreHarness
from tests.store.test_series import counts, minute

__all__ = ["app", "db"]

HOSTILE = "web\x1b[2J\u202e"
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def recovered(db: StoreHarness) -> str:
    """Let a recovery happen and return the id of its task."""
    claimed = db.running("w1", policy=b'{"on_crash": "retry"}')
    (lease,) = db.leases()
    db.recover(lease, "retry", error=b'{"code": "WORKER_CRASHED", "message": "died", "data": {}}')
    assert db.cancel(claimed.id) == "CANCELLED"
    return str(claimed.id)


def test_a_pipe_gets_one_look_with_trees_rates_tasks_and_recoveries(
    everbeat: Command, db: StoreHarness
) -> None:
    recovered(db)
    db.send(queue="films")
    db.connection.execute(db.plain("update {schema}.tasks set queue = %s"), ["films\nleases"])
    for at in (minute(db), minute(db) - timedelta(minutes=1)):  # the minute can end before the command looks
        db.run(series.write_rates([counts(at, started=120, completed=60, failed=6)], supervisor="s1"))
    shown = everbeat("top").assert_code(0).out
    assert "each second: 2.0 started, 1.0 completed, 0.1 failed, 0.0 retried" in shown
    assert "tasks: 1 due, oldest " in shown
    assert " in films\\nleases" in shown
    assert "leases: 0 overdue" in shown
    (tree,) = [line for line in shown.splitlines() if line.startswith("s1 ")]
    assert tree.split()[1:3] == ["host", "1"]
    below = shown.partition("Latest recoveries\n")[2].splitlines()
    assert below[0].split()[:4] == ["AT", "TASK", "WAS", "NOTICED"]
    assert {"work", "RUNNING", "retry", "CANCELLED"} <= {*below[1].split()}


def test_json_has_the_same_look(everbeat: Command, db: StoreHarness) -> None:
    task_id = recovered(db)
    found = everbeat("top", "--json").assert_code(0).document["top"]
    assert [each["supervisor"]["supervisor_id"] for each in found["trees"]] == ["s1"]
    assert [each["task_id"] for each in found["recoveries"]] == [task_id]
    assert (found["started"], found["overdue"], found["due"]) == (0, 0, 0)


def look(app: App) -> Overview:
    return database_of(app).run(overview(app.recovery, recoveries=10), name="top", twin="top")


def test_a_frame_fits_into_the_terminal_and_counts_the_trees_that_do_not(app: App, db: StoreHarness) -> None:
    found = look(app)
    (tree,) = found.trees
    trees = [replace(tree, supervisor=replace(tree.supervisor, hostname=f"host-{n}")) for n in range(500)]
    lines = frame(replace(found, trees=trees), width=80, height=24)
    assert len(lines) == 24
    assert all(line.cell_len <= 80 for line in lines)
    shown = "\n".join(line.plain for line in lines)
    assert "500 trees" in shown
    assert re.search(r"… and 4\d\d more trees", shown)
    recovered(db)
    (recovery,) = look(app).recoveries
    full = replace(found, trees=trees, recoveries=[recovery] * 10)
    assert len(frame(full, width=80, height=24)) == 24
    assert len(frame(full, width=80, height=12)) <= 12


def test_an_empty_cluster_is_said_to_be_empty(everbeat: Command, db: StoreHarness) -> None:
    db.connection.execute(db.plain("update {schema}.supervisors set ended_at = now(), ended_how = 'left'"))
    shown = everbeat("top", "--once").assert_code(0).out
    assert "No supervisor runs." in shown
    assert "none due" in shown
    assert "None are recorded." in shown


def test_a_terminal_without_a_screen_gets_one_look(everbeat: Command, db: StoreHarness) -> None:
    leader, follower = pty.openpty()
    shown = b""
    try:
        process = subprocess.Popen(
            everbeat.argv("top"), env={**everbeat.environment, "TERM": "dumb"}, cwd=everbeat.folder,
            stdin=follower, stdout=follower, stderr=follower,
        )  # fmt: skip
        assert process.wait(timeout=60) == 0
        shown = os.read(leader, 65_536)
    finally:
        process.kill()
        os.close(follower)
        os.close(leader)
    assert b"leases: 0 overdue" in shown


def test_the_screen_follows_the_cluster_until_ctrl_c(everbeat: Command, db: StoreHarness) -> None:
    db.connection.execute(db.plain("update {schema}.supervisors set hostname = %s"), [HOSTILE])
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        everbeat.argv("top", "--every", "0.5"),
        env={**everbeat.environment, "TERM": "xterm", "COLUMNS": "160", "LINES": "40", "PYTHONIOENCODING": "utf-8"},
        cwd=everbeat.folder, stdin=follower, stdout=follower, stderr=follower,
    )  # fmt: skip
    os.close(follower)
    written = b""

    def read_until(truth: Callable[[str], bool]) -> None:
        nonlocal written
        began = time.monotonic()
        while not truth(_CONTROL.sub("", written.decode(errors="replace"))):
            assert time.monotonic() - began < 30, written[-2_000:]
            written += os.read(leader, 65_536)

    try:
        read_until(lambda shown: "None are recorded." in shown)
        recovered(db)
        written = b""
        read_until(lambda shown: "RUNNING" in shown.partition("NOTICED BY")[2])
        assert "\u202e" not in written.decode(errors="replace"), "names cannot control the terminal"
        process.send_signal(signal.SIGINT)
        with suppress(OSError):  # the end of the terminal
            while os.read(leader, 65_536):
                pass
        assert process.wait(timeout=30) == 130
    finally:
        process.kill()
        process.wait()
        os.close(leader)
