"""Test the output of `everbeat sweep`."""

from __future__ import annotations

from everbeat import App
from tests.cli.conftest import Command
from tests.client.conftest import app, db
from tests.store.conftest import StoreHarness

__all__ = ["app", "db"]


def age(db: StoreHarness, worker: str, minutes: int) -> None:
    """Date the last heartbeats of the worker and of its supervisor back by this many minutes."""
    moment = f"statement_timestamp() - interval '{minutes} minutes'"
    for change in (
        f"update {{schema}}.workers set last_beat_at = {moment}, started_at = {moment} where id = '{worker}'",
        f"update {{schema}}.supervisors set last_beat_at = {moment}",
        f"update {{schema}}.tasks set claimed_at = {moment}, started_at = {moment}",
    ):
        db.connection.execute(db.plain(change))


def test_a_sweep_names_workers_that_are_silent_for_less_than_the_threshold(
    app: App, db: StoreHarness, everbeat: Command
) -> None:  # J10
    for _ in range(2):
        db.running("w1")
    assert everbeat("sweep", "--dry-run", "--threshold", "10m").assert_code(0).err.count("silent") == 0
    age(db, "w1", 3)
    answer = everbeat("sweep", "--dry-run", "--threshold", "10m").assert_code(0).err
    assert "No dead worker holds a task.\n" in answer
    assert "1 silent worker holds 2 tasks but is still below the threshold: w1.\n" in answer
    age(db, "w1", 20)
    answer = everbeat("sweep", "--dry-run", "--threshold", "10m").assert_code(0).err
    assert "silent" not in answer
    assert "Dry run: 2 tasks of 2 workers would be recovered." in answer
