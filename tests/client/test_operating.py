"""Test sweep and release through the app: its hooks decide, and contradictory options are refused first."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

from everbeat import App
from everbeat.errors import BlockingCallInLoop, ConfigurationError, RegistrationError, UnknownName
from everbeat.recovery import RecoveryContext, Reschedule, SweepSummary
from tests.recovering.test_sweep import everything, silence
from tests.store.conftest import StoreHarness


def test_a_sweep_calls_the_hooks_of_the_app(app: App, db: StoreHarness) -> None:  # F2, F7
    told: list[RecoveryContext] = []
    passes: list[SweepSummary] = []

    arguments: list[Any] = []

    @app.on_recovery
    def later(context: RecoveryContext) -> Reschedule:
        arguments.append(app.info(context.task_id).arguments)
        return Reschedule(run_at=timedelta(hours=1))

    app.on_interrupted(told.append)

    @app.on_recovered
    async def note(summary: SweepSummary) -> None:
        await asyncio.sleep(0)  # hooks may be asynchronous
        passes.append(summary)

    running = db.running()
    silence(db, "s1", 2)
    rehearsal = app.sweep_stale_workers(dry_run=True, sweep_threshold="60s")
    assert (rehearsal.worker_ids, rehearsal.tasks[0].action, told) == (("w1", "w2"), "fail", [])
    result = app.sweep_stale_workers(sweep_threshold="60s", recovery_delay="30s")
    assert (result.recovered_count, result.tasks[0].action) == (1, "reschedule")
    assert [context.task_id for context in told] == [running.id]
    assert arguments == [{}], "a hook can read the arguments"
    assert [summary.task_ids for summary in passes] == [(running.id,)]
    assert told[0].sweeping_worker_id == passes[0].sweeping_worker_id


async def test_a_sweep_on_an_event_loop_calls_the_hooks_on_that_loop(
    app: App, db: StoreHarness
) -> None:  # F7
    seen: list[Any] = []

    @app.on_recovery(task="work")
    async def later(context: RecoveryContext) -> Reschedule:
        seen.append(asyncio.get_running_loop())
        return Reschedule(run_at=timedelta(hours=1))

    db.running()
    silence(db, "s1", 6)
    assert (await app.asweep_stale_workers()).tasks[0].action == "reschedule"
    assert seen == [asyncio.get_running_loop()]
    with pytest.raises(BlockingCallInLoop, match="asweep_stale_workers"):
        app.sweep_stale_workers()
    await app.aclose()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sweep_threshold": "59s"}, r"at least two heartbeat intervals \(1m\)"),
        ({"sweep_threshold": -1}, "must not be negative"),
        ({"recovery_delay": "-3s"}, "is negative"),
        ({"recovery_delay": timedelta(seconds=-3)}, "must not be negative"),
        ({"resilient_sweep_threshold_multiplier": 0}, "from 1 to 100"),
        ({"resilient_task_flags": "slow"}, "must be a list"),
        (
            {"resilient_task_flags": {"slow": "yes"}},
            r"resilient_task_flags = \{'slow': 'yes'\}.*Fix: write \['slow'\]",
        ),
        ({"dry_run": "yes"}, "dry_run = 'yes': must be True or False"),
        (
            {"sweep_treshold": "60s"},
            r"App.sweep_stale_workers.sweep_treshold = '60s': .*no argument.*Fix: use sweep_threshold",
        ),
    ],
)
def test_a_sweep_refuses_contradictory_options_before_it_changes_anything(
    app: App, db: StoreHarness, options: dict[str, Any], said: str
) -> None:  # bad input: thresholds and delays of sweeps
    running = db.running()
    silence(db, "s1", 6)
    before = everything(db)
    with pytest.raises(ConfigurationError, match=said):
        app.sweep_stale_workers(**options)
    assert everything(db) == before
    db.settle(running)


def test_release_workers_releases_only_known_workers(app: App, db: StoreHarness) -> None:
    released: list[UUID] = []
    app.on_interrupted(lambda context: released.append(context.task_id))
    running = db.running()
    result = app.release_workers(["w1"])
    assert (result.worker_ids, result.recovered_count) == (("w1",), 1)
    assert released == [running.id]
    with pytest.raises(UnknownName, match="Worker 'w9' is not known here"):
        app.release_workers(["w9", "w2"])
    with pytest.raises(ConfigurationError, match=r"write \['w2'\]"):
        app.release_workers("w2")
    assert [worker.worker_id for worker in app.list_active_workers()] == ["w2"]


def test_a_second_hook_for_the_same_scope_is_refused_with_both_places(app: App) -> None:
    @app.on_recovery(task="work")
    def one(context: RecoveryContext) -> Reschedule:
        return Reschedule(timedelta(0))

    with pytest.raises(RegistrationError, match="already an on_recovery hook for task 'work'") as refusal:
        app.on_recovery(task="work")(one)
    assert refusal.value.message.count(__file__) == 2
    app.on_recovered(print)
    with pytest.raises(RegistrationError, match="already an on_recovered hook of this app"):
        app.on_recovered(print)
