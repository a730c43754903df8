"""Test each reason why a task is not running: it appears in its situation and disappears when that is repaired."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

from everbeat import App, RecoveryConfig, TaskState
from everbeat.domain.explain.reasons import ADVICE, ReasonCode
from everbeat.errors import TaskNotFound
from everbeat.errors.tasks import BUILT_IN_CODES
from everbeat.inspection import Explanation, Reason
from everbeat.store import diagnosis, workers
from tests.store.conftest import StoreHarness

POISON = b'{"code": "WORKER_CRASHED", "data": {"poison": true}}'


def change(db: StoreHarness, table: str, setting: str, where: str = "true") -> None:
    db.connection.execute(f"update {db.target.schema}.{table} set {setting} where {where}")  # type: ignore[arg-type]


def codes(app: App, task_id: UUID) -> list[str]:
    return [reason.code for reason in app.explain(task_id).reasons]


def the_reason(app: App, task_id: UUID, code: ReasonCode) -> Reason:
    explanation = app.explain(task_id)
    (found,) = (reason for reason in explanation.reasons if reason.code is code)
    return found


def pause(db: StoreHarness, kind: str, name: str, **more: Any) -> None:
    values = {"kind": kind, "name": name, "paused_by": "ann", "reason": None, "crashes": None} | more
    db.connection.execute(
        f"insert into {db.target.schema}.pauses (kind, name, paused_by, reason, crashes)"  # type: ignore[arg-type]
        " values (%(kind)s, %(name)s, %(paused_by)s, %(reason)s, %(crashes)s)",
        values,
    )


def join(
    db: StoreHarness, worker: str, *, queues: list[str] | None = None, metadata: str | None = None
) -> None:
    row = workers.WorkerRow(
        id=worker, supervisor_id="s1", hostname="host", pid=3, process_started=None, queues=queues, metadata=metadata,
    )  # fmt: skip
    db.run(workers.register_worker(row))


def end_workers(db: StoreHarness, *names: str) -> None:
    db.run(workers.bury_workers(worker_ids=names, how="test"))


class TestWaiting:
    def test_a_due_task_is_explained_by_its_place_in_the_queue(self, app: App, db: StoreHarness) -> None:
        first, second = db.send(), db.send()
        assert codes(app, first) == codes(app, second) == ["IN_LINE"]
        reason = the_reason(app, second, ReasonCode.IN_LINE)
        assert "1 due task of its queue before it, 2 live workers" in reason.text
        assert "no due tasks" in the_reason(app, first, ReasonCode.IN_LINE).text
        assert reason.since == app.info(second).enqueued_at
        assert app.info(second).waiting_because is None

    @pytest.mark.parametrize(("column", "largest"), [("fence", 2**63 - 1), ("attempt", 2**31 - 1)])
    def test_a_task_whose_counter_has_no_next_value_is_explained_as_a_bad_row(
        self, app: App, db: StoreHarness, column: str, largest: int
    ) -> None:  # J9
        bad, next_one = (db.send(serial="line") for _ in range(2))
        change(db, "tasks", f"{column} = {largest}", f"id = '{bad}'")
        reason = the_reason(app, bad, ReasonCode.BAD_ROW)
        assert (reason.blocked_by, reason.command) == (column, "everbeat doctor")
        assert f"{column!r} is {largest}" in reason.text
        assert "set the column" in reason.text
        assert codes(app, next_one) == ["IN_LINE"], "the serial line continues without the bad row"
        assert [one.id for one in db.claim()] == [next_one]
        change(db, "tasks", f"{column} = 0", f"id = '{bad}'")
        assert "BAD_ROW" not in codes(app, bad)
        db.connection.execute(
            db.plain("delete from {schema}.tasks where id = %s"), [bad]
        )  # another task overtook it

    def test_a_blocked_worker_that_could_run_the_task_is_a_reason(self, app: App, db: StoreHarness) -> None:
        def told(worker: str, lag_ms: float) -> None:
            state = workers.WorkerState(
                worker_id=worker,
                running=1,
                claimed=0,
                slots=9,
                rss_bytes=1,
                cpu_percent=0,
                loop_lag_ms=lag_ms,
            )
            db.run(workers.record_states([state]))

        task = db.send()
        told("w1", 5_000.0)
        told("w2", 900.0)
        two = the_reason(app, task, ReasonCode.IN_LINE).text
        assert two.endswith("2 live workers that can run it, 1 of them with a lagging event loop")
        end_workers(db, "w2")
        one = the_reason(app, task, ReasonCode.IN_LINE).text
        assert one.endswith("1 live worker that can run it, whose event loop lags")
        told("w1", 3.0)
        assert "lag" not in the_reason(app, task, ReasonCode.IN_LINE).text

    def test_a_missing_live_worker_is_a_reason_since_the_last_heartbeat(
        self, app: App, db: StoreHarness
    ) -> None:
        task = db.send()
        change(db, "supervisors", "last_beat_at = last_beat_at - interval '1 hour'")
        reason = the_reason(app, task, ReasonCode.NO_WORKER)
        assert reason.since == app.info(task).enqueued_at, "the task was sent after the last worker had died"
        assert (reason.text, reason.command) == ("no live worker", "everbeat worker MODULE:APP")
        change(
            db,
            "tasks",
            "sent_at = sent_at - interval '2 hours', enqueued_at = enqueued_at - interval '2 hours'",
        )
        assert the_reason(app, task, ReasonCode.NO_WORKER).since == max(
            each.last_heartbeat_at for each in app.list_workers()
        )
        change(db, "tasks", "enqueued_at = enqueued_at + interval '4 hours'")
        later = the_reason(app, task, ReasonCode.NO_WORKER).since
        assert later == max(each.last_heartbeat_at for each in app.list_workers()), "it is due in the future"
        change(db, "tasks", "enqueued_at = sent_at")
        change(db, "supervisors", "last_beat_at = statement_timestamp()")
        assert codes(app, task) == ["IN_LINE"]

    def test_supervisors_that_cannot_start_workers_are_named_if_no_worker_can_run_the_task(  # J8
        self, app: App, db: StoreHarness
    ) -> None:
        db.supervisor("s2")
        for name, problem in (("s1", "no module 'shop'"), ("s2", None)):
            db.run(workers.record_starts(name, processes=2, problem=problem, age_ms=5_000))
        task = db.send()
        assert codes(app, task) == ["IN_LINE"], "its live worker can run it"
        end_workers(db, "w1", "w2")
        assert codes(app, task) == ["NO_WORKER", "WORKER_NOT_STARTED"]
        reason = the_reason(app, task, ReasonCode.WORKER_NOT_STARTED)
        assert "supervisor s1 (pid " in reason.text
        assert reason.text.endswith(" on host cannot start a worker process: no module 'shop'")
        assert reason.blocked_by == "s1"
        assert reason.since == app.list_supervisors()[1].start_problem_at
        change(db, "supervisors", "last_beat_at = last_beat_at - interval '1 hour'")
        assert codes(app, task) == ["NO_WORKER"], "a dead supervisor cannot start workers"

    def test_a_worker_that_could_not_take_the_task_was_not_the_last_that_could(
        self, app: App, db: StoreHarness
    ) -> None:  # J10
        end_workers(db, "w1", "w2")
        task = db.send()
        change(
            db,
            "tasks",
            "sent_at = sent_at - interval '2 hours', enqueued_at = enqueued_at - interval '2 hours'",
        )
        past = "statement_timestamp() - interval '1 hour'"
        change(db, "workers", f"started_at = {past}, last_beat_at = {past}, ended_at = {past}")
        change(db, "workers", "ended_at = ended_at - interval '1 minute'", "id = 'w2'")
        join(db, "w3", queues=["mails"])
        join(db, "w4", metadata='{"tasks": ["welcome"]}')
        ends = {each.worker_id: each.ended_at for each in app.list_workers(ended=True)}
        assert the_reason(app, task, ReasonCode.NAME_UNKNOWN).since == ends["w1"]
        end_workers(db, "w4")
        assert the_reason(app, task, ReasonCode.QUEUE_NOT_SERVED).since == ends["w1"]
        end_workers(db, "w3")
        assert the_reason(app, task, ReasonCode.NO_WORKER).since == ends["w1"], (
            "its supervisor still sends heartbeats"
        )

    def test_a_live_supervisor_that_restarts_its_workers_is_named(
        self, app: App, db: StoreHarness
    ) -> None:  # J10
        db.run(workers.record_starts("s1", processes=2, problem=None, age_ms=0))
        task = db.send()
        end_workers(db, "w1", "w2")
        reason = the_reason(app, task, ReasonCode.NO_WORKER)
        assert (
            reason.text == "no live worker; live supervisor s1 (pid 1) on host restarts its worker processes"
        )
        assert reason.command == "everbeat workers"
        assert reason.since == app.info(task).enqueued_at
        db.supervisor("s2")
        join(db, "w3", queues=["mails"])
        change(db, "workers", "supervisor_id = 's2'", "id = 'w3'")
        queue = the_reason(app, task, ReasonCode.QUEUE_NOT_SERVED)
        assert queue.text.endswith("; live supervisor s1 (pid 1) on host restarts its worker processes")
        assert queue.command == "everbeat workers"
        change(db, "workers", "queues = array['mail']", "id in ('w1', 'w2')")
        other = the_reason(app, task, ReasonCode.QUEUE_NOT_SERVED)
        assert "restarts" not in other.text, "its workers did not serve the queue"
        assert other.command == "everbeat worker MODULE:APP --queues default"
        end_workers(db, "w3")
        change(db, "workers", "queues = null")
        change(db, "supervisors", "draining = true", "id = 's1'")
        assert the_reason(app, task, ReasonCode.NO_WORKER).command == "everbeat worker MODULE:APP"

    def test_an_unserved_queue_and_an_unknown_task_name_are_reasons(self, app: App, db: StoreHarness) -> None:
        end_workers(db, "w1", "w2")
        join(db, "w3", queues=["mails"], metadata='{"tasks": ["welcome", "work"]}')
        queue = the_reason(app, db.send(queue="mail"), ReasonCode.QUEUE_NOT_SERVED)
        assert queue.text == "no live worker serves queue 'mail' (did you mean 'mails'?)"
        assert (queue.blocked_by, queue.command) == ("mail", "everbeat worker MODULE:APP --queues mail")
        name = the_reason(app, db.send("welcom", queue="mails"), ReasonCode.NAME_UNKNOWN)
        assert name.text.endswith("knows task 'welcom' (did you mean 'welcome'?)")
        assert (name.blocked_by, name.command) == ("welcom", "everbeat check MODULE:APP")
        assert codes(app, db.send(queue="mails")) == ["IN_LINE"]

    def test_a_scheduled_task_is_explained_by_its_due_time(self, app: App, db: StoreHarness) -> None:
        task = db.send(delay_ms=3_600_000)
        reason = the_reason(app, task, ReasonCode.SCHEDULED)
        info = app.info(task)
        assert (reason.since, reason.until) == (info.sent_at, info.enqueued_at)
        assert info.waiting_because == reason.text

    def test_a_later_retry_is_explained_by_the_error_before_it(self, app: App, db: StoreHarness) -> None:
        claimed = db.running(policy=b'{"max_retries": 5, "intervals": [60], "retry_for": ["SMTP_DOWN"]}')
        error = b'{"code": "SMTP_DOWN", "message": "no answer"}'
        assert db.settle(claimed, "FAILED", error=error, retry_in_ms=60_000) == "PENDING"
        reason = the_reason(app, claimed.id, ReasonCode.RETRY_DUE_LATER)
        assert reason.text.startswith("retry 1 of 5 is due at ")
        assert reason.text.endswith("because attempt 1 failed: SMTP_DOWN: no answer")
        assert reason.until == app.info(claimed.id).next_retry_at

    def test_a_recovery_that_delays_a_running_task_is_a_reason(self, app: App, db: StoreHarness) -> None:
        claimed = db.running()
        (lease,) = db.leases()
        db.recover(lease, "retry", retry_in_ms=60_000)
        reason = the_reason(app, claimed.id, ReasonCode.RECOVERY_DELAYED)
        (recovery,) = app.recoveries(claimed.id)
        assert "worker w1, which ran it, died: vanished" in reason.text
        assert (reason.since, reason.until) == (recovery.noticed_at, recovery.next_retry_at)
        assert reason.command == f"everbeat recoveries show {recovery.id}"

    def test_a_recovery_delays_a_claim_that_had_not_started(self, app: App, db: StoreHarness) -> None:  # F5
        task = db.send()
        db.claim("w1")
        (lease,) = db.leases()
        db.recover(lease, "requeue", retry_in_ms=60_000)
        reason = the_reason(app, task, ReasonCode.RECOVERY_DELAYED)
        assert reason.text.startswith("it is due again at ")
        assert reason.until == app.info(task).enqueued_at

    def test_a_paused_task_name_and_a_paused_queue_are_reasons(self, app: App, db: StoreHarness) -> None:
        task = db.send(queue="mail")
        pause(db, "task", "work", paused_by="brake", crashes=50, reason="it kills its workers")
        pause(db, "queue", "mail")
        assert codes(app, task) == ["TASK_PAUSED", "QUEUE_PAUSED"]
        named = the_reason(app, task, ReasonCode.TASK_PAUSED)
        assert named.text == "task 'work' was paused by brake after 50 crashes: it kills its workers"
        assert (named.blocked_by, named.command) == ("work", "everbeat tasks resume work")
        queued = the_reason(app, task, ReasonCode.QUEUE_PAUSED)
        assert queued.text == "queue 'mail' was paused by ann"
        assert queued.command == "everbeat queues resume mail"
        assert queued.since is not None
        assert app.info(task).waiting_because == f"{named.text}; {queued.text}"
        db.connection.execute(f"delete from {db.target.schema}.pauses")  # type: ignore[arg-type]
        assert codes(app, task) == ["IN_LINE"]

    def test_a_serial_task_is_explained_by_the_task_at_the_head_of_its_line(
        self, app: App, db: StoreHarness
    ) -> None:
        first, second, third = (db.send(serial="key:a") for _ in range(3))
        assert codes(app, first) == ["IN_LINE"]
        reason = the_reason(app, third, ReasonCode.SERIAL_LINE)
        assert reason.blocked_by == str(first)
        assert reason.command == f"everbeat explain {first}"
        assert "is first and is PENDING, with 1 more behind it" in reason.text
        (claimed,) = db.claim("w1", limit=1)
        db.start(claimed)
        assert "is RUNNING" in the_reason(app, second, ReasonCode.SERIAL_LINE).text
        db.settle(claimed, "FAILED", error=b'{"code": "X"}', retry_in_ms=60_000)
        waits = the_reason(app, second, ReasonCode.SERIAL_LINE)
        assert "is not due yet" in waits.text
        assert waits.until == app.info(first).next_retry_at
        app.cancel(first)
        assert codes(app, second) == ["IN_LINE"]
        app.cancel(second)
        app.cancel(third)

    def test_a_suspect_is_explained_by_its_wait_for_a_separate_process(
        self, app: App, db: StoreHarness
    ) -> None:
        claimed = db.running()
        (lease,) = db.leases()
        db.recover(lease, "retry")
        change(db, "tasks", "suspect = true")
        change(db, "recoveries", "suspect = true, cause = 'killed by SIGSEGV'")
        reason = the_reason(app, claimed.id, ReasonCode.SUSPECT)
        assert "worker w1, which ran it, died: killed by SIGSEGV" in reason.text
        assert reason.since == app.recoveries()[0].noticed_at
        other = db.running("w2")
        change(db, "tasks", "suspect = true", f"id = '{other.id}'")
        assert other.id == claimed.id  # first in first out: it is taken now
        assert codes(app, claimed.id) == ["RUNNING"]
        db.settle(other, result=b"null")

    def test_busy_slots_of_all_workers_are_a_reason(self, app: App, db: StoreHarness) -> None:
        end_workers(db, "w2")
        snapshot = workers.WorkerState(
            worker_id="w1", running=1, claimed=0, slots=1, rss_bytes=1, cpu_percent=0, loop_lag_ms=0
        )
        db.run(workers.record_states([snapshot]))
        waiting = db.send()
        assert codes(app, waiting) == ["IN_LINE"]
        running, _ = db.claim("w1")[0], db.send()
        db.start(running)
        late = db.send()
        reason = the_reason(app, late, ReasonCode.SLOTS_BUSY)
        assert "slots of the 1 live worker that can run it: 1 slot, all busy" in reason.text
        assert app.info(late).waiting_because is None
        db.settle(running, result=b"null")
        assert codes(app, late) == ["IN_LINE"]

    def test_only_busy_slots_of_the_executor_of_the_task_are_a_reason(
        self, app: App, db: StoreHarness
    ) -> None:
        end_workers(db, "w1", "w2")
        executors = '{"async": {"slots": 500, "tasks": ["quick"]}, "process": {"slots": 1, "tasks": ["work", "film"]}}'
        join(db, "w3", metadata=f'{{"tasks": ["quick", "work", "film"], "executors": {executors}}}')
        db.send("film")
        (film,) = db.claim("w3", names=["film"])
        db.start(film)
        assert codes(app, db.send()) == ["SLOTS_BUSY"]
        assert codes(app, db.send("quick")) == ["IN_LINE"]
        db.settle(film, result=b"null")

    def test_a_near_or_too_early_deadline_is_a_reason(self, app: App, db: StoreHarness) -> None:
        now = datetime.now(UTC)
        near = db.send(good_until=now + timedelta(seconds=30))
        assert codes(app, near) == ["IN_LINE", "DEADLINE_NEAR"]
        assert the_reason(app, near, ReasonCode.DEADLINE_NEAR).until == now + timedelta(seconds=30)
        far = db.send(good_until=now + timedelta(hours=1))
        assert codes(app, far) == ["IN_LINE"]
        never = db.send(good_until=now + timedelta(hours=1), delay_ms=2 * 3_600_000)
        assert codes(app, never) == ["SCHEDULED", "DEADLINE_TOO_EARLY"]
        change(db, "tasks", "good_until = sent_at", f"id = '{far}'")
        assert codes(app, far) == ["DEADLINE_PASSED"]
        assert "will expire" in str(app.info(far).waiting_because)


class TestHeld:
    def test_a_running_task_is_explained_by_its_worker_and_its_progress(
        self, app: App, db: StoreHarness
    ) -> None:
        claimed = db.running(policy=b'{"timeout_ms": 60000, "stall_timeout_ms": 5000}')
        assert codes(app, claimed.id) == ["RUNNING", "PROGRESS_STANDS"]
        info = app.info(claimed.id)
        assert info.started_at is not None
        runs = the_reason(app, claimed.id, ReasonCode.RUNNING)
        assert "worker w1 (pid 2 on host) runs attempt 1" in runs.text
        assert (runs.since, runs.blocked_by) == (info.started_at, "w1")
        assert runs.until == info.started_at + timedelta(minutes=1)
        stands = the_reason(app, claimed.id, ReasonCode.PROGRESS_STANDS)
        assert (stands.since, stands.until) == (info.started_at, info.started_at + timedelta(seconds=5))
        change(
            db, "tasks", """progress = '{"stage": "pack", "fraction": 0.5}', progress_at = started_at + interval '2 s'"""
        )  # fmt: skip
        assert "progress: pack 50%" in the_reason(app, claimed.id, ReasonCode.RUNNING).text
        assert "limits it" not in the_reason(app, claimed.id, ReasonCode.RUNNING).text
        stands = the_reason(app, claimed.id, ReasonCode.PROGRESS_STANDS)
        assert stands.since == info.started_at + timedelta(seconds=2)
        app.cancel(claimed.id)
        assert codes(app, claimed.id) == ["RUNNING", "PROGRESS_STANDS", "CANCEL_REQUESTED"]
        db.settle(claimed, "CANCELLED")

    def test_a_running_task_without_a_timeout_is_explained_as_unlimited(
        self, app: App, db: StoreHarness
    ) -> None:  # G2
        claimed = db.running()
        text = the_reason(app, claimed.id, ReasonCode.RUNNING).text
        assert text.endswith("; neither a timeout nor a stall_timeout limits it")
        db.settle(claimed)

    def test_a_claimed_task_is_explained_by_the_tasks_that_run_before_it(
        self, app: App, db: StoreHarness
    ) -> None:
        busy = db.running()
        task = db.send()
        db.claim("w1")
        reason = the_reason(app, task, ReasonCode.CLAIMED)
        assert "when a slot is free: it runs 1 other task now" in reason.text
        assert (reason.since, reason.blocked_by) == (app.info(task).claimed_at, "w1")
        app.cancel(task)
        db.settle(busy, result=b"null")

    def test_a_silent_worker_that_holds_the_task_is_a_reason(self, app: App, db: StoreHarness) -> None:
        db.supervisor("s2", "w9")
        claimed = db.running()
        past = "interval '100 s'"
        change(db, "supervisors", f"last_beat_at = last_beat_at - {past}", "id = 's1'")
        change(
            db,
            "tasks",
            f"sent_at = sent_at - {past}, claimed_at = claimed_at - {past}, started_at = started_at - {past}",
        )
        assert codes(app, claimed.id) == ["HOLDER_SILENT", "RUNNING"]
        reason = the_reason(app, claimed.id, ReasonCode.HOLDER_SILENT)
        assert reason.since is not None
        # running_stale_threshold_ms and one check_interval_ms after its last sign of life
        assert reason.until == reason.since + timedelta(seconds=300 + 30)
        assert (reason.blocked_by, reason.command) == ("w1", "everbeat sweep --dry-run")
        change(db, "tasks", """flags = '{"infrastructure_resilient": true}'""")
        assert the_reason(app, claimed.id, ReasonCode.HOLDER_SILENT).until == reason.since + timedelta(
            seconds=930
        )
        change(db, "supervisors", "last_beat_at = statement_timestamp()", "id = 's1'")
        assert codes(app, claimed.id) == ["RUNNING"]
        db.settle(claimed, result=b"null")

    def test_a_missing_supervisor_that_could_recover_the_task_is_a_reason(
        self, database_url: str, schema: str, app: App, db: StoreHarness
    ) -> None:
        claimed = db.running()
        past = "interval '100 s'"
        change(db, "supervisors", f"last_beat_at = last_beat_at - {past}")
        change(
            db,
            "tasks",
            f"sent_at = sent_at - {past}, claimed_at = claimed_at - {past}, started_at = started_at - {past}",
        )
        assert codes(app, claimed.id) == ["HOLDER_SILENT", "NOBODY_SWEEPS", "RUNNING"]
        config = RecoveryConfig(auto_fail_stale_running=False)
        manual = App(database_url, schema=schema, recovery=config)
        explanation = manual.explain(claimed.id)
        manual.close()
        silent, off, *_ = explanation.reasons
        assert (silent.code, silent.until) == ("HOLDER_SILENT", None)
        assert (off.code, off.blocked_by) == ("RECOVERY_OFF", "auto_fail_stale_running")
        db.settle(claimed, result=b"null")

    def test_a_recovery_hook_that_left_the_task_to_its_worker_is_a_reason(
        self, app: App, db: StoreHarness
    ) -> None:
        db.supervisor("s2", "w9")
        claimed = db.running()
        change(db, "tasks", "left_claim_id = claim_id, left_at = statement_timestamp()")
        assert codes(app, claimed.id) == ["RUNNING"]
        change(db, "workers", "ended_at = statement_timestamp()", "id = 'w1'")
        assert codes(app, claimed.id) == ["HOLDER_ENDED", "HOOK_SKIPPED", "RUNNING"]
        ended = the_reason(app, claimed.id, ReasonCode.HOLDER_ENDED)
        assert "recovers" not in ended.text, "the hook skipped it, so no supervisor recovers it"
        assert ended.until is None
        assert (
            "w1 (pid 2 on host) had started attempt 1" in the_reason(app, claimed.id, ReasonCode.RUNNING).text
        )
        skipped = the_reason(app, claimed.id, ReasonCode.HOOK_SKIPPED)
        assert skipped.since == db.row(claimed.id, "left_at")
        assert skipped.since is not None
        assert skipped.until == skipped.since + timedelta(seconds=30)  # check_interval_ms
        assert skipped.text.endswith("w1 keeps it; after that, the next sweep calls the hook again")
        change(db, "tasks", "left_at = left_at - interval '31 s'")
        skipped = the_reason(app, claimed.id, ReasonCode.HOOK_SKIPPED)
        assert skipped.until is None
        assert skipped.text.endswith("it is due for a sweep: the next sweep calls the hook again")
        change(db, "tasks", "left_claim_id = gen_random_uuid()")  # an earlier holder's
        assert codes(app, claimed.id) == ["HOLDER_ENDED", "RUNNING"]
        change(db, "workers", "ended_at = null", "id = 'w1'")
        db.settle(claimed, result=b"null")

    def test_a_missing_supervisor_that_could_call_the_hook_again_is_a_reason(
        self, app: App, db: StoreHarness
    ) -> None:
        claimed = db.running()
        change(db, "tasks", "left_claim_id = claim_id, left_at = statement_timestamp()")
        change(db, "workers", "ended_at = statement_timestamp()", "id = 'w1'")
        assert codes(app, claimed.id) == ["HOLDER_ENDED", "HOOK_SKIPPED", "RUNNING"], (
            "its own supervisor calls the hook again"
        )
        change(db, "supervisors", "last_beat_at = last_beat_at - interval '1 hour'")
        assert codes(app, claimed.id) == ["HOLDER_ENDED", "HOOK_SKIPPED", "NOBODY_SWEEPS", "RUNNING"]
        skipped = the_reason(app, claimed.id, ReasonCode.HOOK_SKIPPED)
        assert skipped.until is None
        assert skipped.text.endswith("nothing calls the hook again until a supervisor runs")
        change(db, "workers", "ended_at = null", "id = 'w1'")
        db.settle(claimed, result=b"null")

    def test_a_worker_that_lost_the_process_of_the_code_asks_the_hook_again(
        self, app: App, db: StoreHarness
    ) -> None:
        claimed = db.running(policy=b'{"stall_timeout_ms": 5000}')
        change(db, "tasks", "alone = true, left_claim_id = claim_id, left_at = statement_timestamp()")
        assert codes(app, claimed.id) == ["HOOK_SKIPPED", "RUNNING"]
        assert "after that, its worker calls" in the_reason(app, claimed.id, ReasonCode.HOOK_SKIPPED).text
        assert "had started attempt 1, alone" in the_reason(app, claimed.id, ReasonCode.RUNNING).text
        db.settle(claimed, result=b"null")

    def test_explain_never_promises_a_time_that_is_past(self, app: App, db: StoreHarness) -> None:
        db.supervisor("s2", "w9")
        claimed = db.running()
        long_ago = "interval '2 hours'"
        change(
            db,
            "tasks",
            f"sent_at = sent_at - {long_ago}, claimed_at = claimed_at - {long_ago}, started_at = started_at - {long_ago}",
        )
        change(db, "supervisors", f"last_beat_at = last_beat_at - {long_ago}", "id = 's1'")
        silent = the_reason(app, claimed.id, ReasonCode.HOLDER_SILENT)
        assert silent.until is None
        assert silent.text.endswith("it is due, and the next sweep of a supervisor recovers it")
        change(db, "workers", f"ended_at = statement_timestamp() - {long_ago}", "id = 'w1'")
        ended = the_reason(app, claimed.id, ReasonCode.HOLDER_ENDED)
        assert ended.until is None
        assert ended.text.endswith("it is due, and the next sweep of a supervisor recovers it")
        change(db, "workers", "ended_at = null", "id = 'w1'")
        db.settle(claimed, result=b"null")

    def test_a_worker_that_has_ended_or_never_registered_is_a_reason(
        self, app: App, db: StoreHarness
    ) -> None:
        db.supervisor("s2", "w9")
        claimed = db.running()
        change(
            db, "workers", "ended_at = statement_timestamp(), ended_how = 'child_exit', ended_cause = 'killed by SIGKILL'", "id = 'w1'",
        )  # fmt: skip
        reason = the_reason(app, claimed.id, ReasonCode.HOLDER_ENDED)
        assert "has ended (killed by SIGKILL)" in reason.text
        change(db, "workers", "ended_at = null", "id = 'w1'")
        change(db, "tasks", "claimed_by_worker_id = 'ghost'")
        assert codes(app, claimed.id)[0] == "HOLDER_UNKNOWN"
        change(db, "tasks", "claimed_by_worker_id = 'w1'")
        db.settle(claimed, result=b"null")


class TestEnded:
    POLICY = b'{"max_retries": 1, "intervals": [1], "retry_for": ["X"]}'

    def test_an_ended_task_is_explained_by_its_outcome(self, app: App, db: StoreHarness) -> None:
        done = db.running()
        db.settle(done, result=b"1")
        reason = the_reason(app, done.id, ReasonCode.COMPLETED)
        assert (reason.text, reason.since) == (
            "attempt 1 on worker w1 returned",
            app.info(done.id).completed_at,
        )
        gone = db.send()
        app.cancel(gone)
        assert the_reason(app, gone, ReasonCode.CANCELLED).text == "it was cancelled before its code started"
        assert app.info(gone).error.message == "cancelled before its code started"  # type: ignore[union-attr]
        failed = db.running(policy=self.POLICY)
        db.settle(failed, "FAILED", error=b'{"code": "X"}', retry_in_ms=60_000)
        app.cancel(failed.id)
        assert the_reason(app, failed.id, ReasonCode.CANCELLED).text == (
            "it was cancelled before its code started again; its last run, attempt 1 on worker w1, ended with outcome FAILED"
        )
        assert "started again" in app.info(failed.id).error.message  # type: ignore[union-attr]
        stopped = db.running()
        app.cancel(stopped.id)
        db.settle(stopped, "CANCELLED")
        assert the_reason(app, stopped.id, ReasonCode.CANCELLED).text == (
            "it was cancelled in attempt 1 on worker w1"
        )
        late = db.send(good_until=datetime.now(UTC) - timedelta(seconds=1))
        db.connection.execute(db.text("task/expire_tasks"), {"limit": 10, "channel": db.target.channel})
        assert codes(app, late) == ["EXPIRED"]

    @pytest.mark.parametrize(
        ("policy", "code", "again", "said"),
        [
            (None, b"X", False, "it has no retry policy"),
            (POLICY, b"Y", False, "its policy does not list this error for a retry"),
            (POLICY, b"X", True, "its 1 retry is used up"),
        ],
    )  # fmt: skip
    def test_a_failed_task_says_why_it_was_not_run_again(
        self, app: App, db: StoreHarness, policy: bytes | None, code: bytes, again: bool, said: str
    ) -> None:
        claimed = db.running(policy=policy)
        error = b'{"code": "%s"}' % code
        if again:
            db.settle(claimed, "FAILED", error=error, retry_in_ms=0)
            (claimed,) = db.claim("w1")
            db.start(claimed)
        db.settle(claimed, "FAILED", error=error)
        reason = the_reason(app, claimed.id, ReasonCode.FAILED)
        assert reason.text.endswith(said)
        assert reason.command == f"everbeat tasks retry {claimed.id}"

    def test_a_worker_death_that_is_not_retried_names_the_policy(self, app: App, db: StoreHarness) -> None:
        claimed = db.running()
        (lease,) = db.leases()
        db.recover(lease, "fail")
        assert "on_crash='fail'" in the_reason(app, claimed.id, ReasonCode.FAILED).text
        crashed = db.running()
        (lease,) = db.leases()
        db.recover(lease, "fail", outcome="CRASHED", error=POISON)
        assert the_reason(app, crashed.id, ReasonCode.FAILED).text.endswith(
            ". It did not run again: it has used up its crashes (1)."
            " Find out first why its processes die: a retry resets its counts of crashes and losses"
        )
        lost = db.running()
        (lease,) = db.leases()
        db.recover(lease, "fail", outcome="LOST", error=POISON)
        assert the_reason(app, lost.id, ReasonCode.FAILED).text.endswith(
            ". It did not run again: it has used up its losses (1)."
            " Find out first why its processes die: a retry resets its counts of crashes and losses"
        )

    @pytest.mark.parametrize("policy", [None, b'{"on_crash": "retry"}'])
    def test_a_worker_death_whose_next_run_would_come_after_good_until_says_so(
        self, app: App, db: StoreHarness, policy: bytes | None
    ) -> None:  # C3
        claimed = db.running(policy=policy, good_until=datetime.now(UTC) + timedelta(minutes=5))
        (lease,) = db.leases()
        db.recover(lease, "reschedule", retry_in_ms=600_000)
        text = the_reason(app, claimed.id, ReasonCode.FAILED).text
        assert text.endswith(". It did not run again: its good_until passes before it could run again")
        assert "on_crash" not in text

    def test_an_error_message_that_ends_with_a_full_stop_gets_no_second_one(
        self, app: App, db: StoreHarness
    ) -> None:
        claimed = db.running()
        db.settle(claimed, "FAILED", error=b'{"code": "X", "message": "no progress at all."}')
        text = the_reason(app, claimed.id, ReasonCode.FAILED).text
        assert text.endswith("X: no progress at all. It did not run again: it has no retry policy")

    def test_a_task_whose_steps_differ_is_not_advised_to_be_retried_with_the_same_code(
        self, app: App, db: StoreHarness
    ) -> None:  # J5
        claimed = db.running()
        error = b'{"code": "NON_DETERMINISTIC", "message": "Step \'a\' differs. Fix: give it a name: ctx.named(...)."}'
        db.settle(claimed, "FAILED", error=error)
        reason = the_reason(app, claimed.id, ReasonCode.FAILED)
        assert reason.command is None
        assert reason.text.endswith(
            "ctx.named(...). It did not run again: it has no retry policy. Deploy code that calls the recorded steps as before,"
            f" then run: everbeat tasks retry {claimed.id}"
        )


@pytest.mark.parametrize("code", sorted({*BUILT_IN_CODES, "OWN_CODE"}))
def test_each_code_has_advice_and_a_retry_is_advised_only_if_it_can_help(
    app: App, db: StoreHarness, code: str
) -> None:  # J10
    claimed = db.running()
    db.settle(claimed, "FAILED", error=b'{"code": "%s", "message": "m"}' % code.encode())
    reason = the_reason(app, claimed.id, ReasonCode.FAILED)
    retry = f"everbeat tasks retry {claimed.id}"
    same_again = code in {"ARGUMENTS_INVALID", "RESULT_UNSERIALISABLE", "NON_DETERMINISTIC", "UNKNOWN_LIMIT"}
    assert reason.command == (None if same_again else retry)
    assert ("eploy code that" in reason.text and f"then run: {retry}" in reason.text) == same_again
    plain = {
        "UNHANDLED_EXCEPTION",
        "WORKER_CRASHED",
        "WORKER_STOPPED",
        "TASK_CANCELLED",
        "TASK_EXPIRED",
        "OWN_CODE",
    }
    assert code in plain or ADVICE[code].text.format(again=retry) in reason.text
    assert ADVICE.keys() == BUILT_IN_CODES


def test_the_task_of_a_node_is_retried_with_its_workflow(app: App, db: StoreHarness) -> None:  # J10
    failed, cancelled, workflow = db.running(), db.send(), uuid4()
    db.settle(failed, "FAILED", error=b'{"code": "X"}')
    db.cancel(cancelled)
    change(db, "tasks", f"workflow_id = '{workflow}', node = 1")
    for task_id, code in ((failed.id, "FAILED"), (cancelled, "CANCELLED")):
        (reason,) = app.explain(task_id).reasons
        assert (reason.code, reason.command) == (code, f"everbeat explain {workflow}")
    change(db, "tasks", "workflow_id = null, node = null")


@pytest.mark.parametrize("action", ["requeue", "retry"])
def test_a_recovery_reports_its_next_run_only_if_that_is_later(
    app: App, db: StoreHarness, action: str
) -> None:
    for delay_ms in (0, 60_000):
        db.send() if action == "requeue" else db.running()
        if action == "requeue":
            db.claim("w1")
        (lease,) = db.leases()
        db.recover(lease, action, retry_in_ms=delay_ms)
        (reason,) = app.explain(lease.id).second_runs
        assert reason.code == "RECOVERED"
        assert (reason.until is not None) == (delay_ms > 0)
        app.cancel(lease.id)


def test_each_further_run_of_a_task_has_its_reason(app: App, db: StoreHarness) -> None:
    claimed = db.running(policy=b'{"max_retries": 3, "intervals": [1], "retry_for": ["X"]}')
    assert app.explain(claimed.id).second_runs == ()
    db.settle(claimed, "FAILED", error=b'{"code": "X", "message": "down"}', retry_in_ms=0)
    assert [reason.code for reason in app.explain(claimed.id).second_runs] == ["RETRIED"]
    db.claim("w1")
    (lease,) = db.leases()
    db.recover(lease, "requeue")
    (claimed,) = db.claim("w2")
    db.start(claimed)
    (lease,) = db.leases()
    db.recover(lease, "retry")
    change(db, "recoveries", "charge = 'loss', suspect = true", "was = 'RUNNING'")
    (claimed,) = db.claim("w1")
    db.start(claimed)
    db.settle(claimed, "RELEASED")
    (claimed,) = db.claim("w2")
    db.start(claimed)
    db.settle(claimed, "FAILED", error=b'{"code": "Y"}')
    app.retry(claimed.id)
    (claimed,) = db.claim("w2")
    db.start(claimed)
    db.settle(claimed, result=b"null")
    explanation = app.explain(str(claimed.id))
    assert [reason.code for reason in explanation.second_runs] == [
        "RETRIED", "RECOVERED", "RECOVERED", "HANDED_BACK", "RETRIED_BY_OPERATOR"
    ]  # fmt: skip
    failed, requeued, recovered, handed_back, retried = (reason.text for reason in explanation.second_runs)
    assert failed == "attempt 1 failed on worker w1: X: down"
    assert requeued.startswith("worker w1, which had claimed it, died before its code started: vanished")
    assert (
        "which ran attempt 2, died: vanished (noticed by age); charged as a loss; since then it is a suspect"
        in recovered
    )
    assert handed_back.startswith("worker w1 released attempt 3, which is not charged")
    change(db, "recoveries", "noticed_by = 'child_exit'", "was = 'RUNNING'")
    assert "(noticed by child exit)" in app.explain(claimed.id).second_runs[2].text
    change(db, "recoveries", "noticed_by = 'progress', cause = 'no progress for 2s'", "was = 'RUNNING'")
    change(db, "recoveries", "noticed_by = 'operator', cause = 'released'", "was = 'CLAIMED'")
    released, stalled = (reason.text for reason in app.explain(claimed.id).second_runs[1:3])
    assert released.startswith("an operator released worker w1, which held it: released")
    assert stalled.startswith("its code stalled on worker w2: no progress for 2s")
    assert retried == "attempt 4 ended FAILED (Y), and an operator retried the task"
    assert [reason.code for reason in explanation.reasons] == ["COMPLETED"]
    assert explanation.state is TaskState.COMPLETED


def test_a_run_that_an_operator_ordered_has_the_time_of_the_order(app: App, db: StoreHarness) -> None:  # J10
    def moment() -> datetime:
        return [each for each in app.explain(first.id).second_runs if each.code == "RETRIED_BY_OPERATOR"][
            -1
        ].since  # type: ignore[return-value]

    first = db.running()
    db.settle(first, "FAILED", error=b'{"code": "X"}')
    change(db, "attempts", "ended_at = ended_at - interval '1 hour'", "attempt = 1")
    app.retry(first.id)
    ordered_at = app.info(first.id).enqueued_at
    assert moment() == ordered_at
    (again,) = db.claim("w1")
    db.start(again)
    db.settle(again, "FAILED", error=b'{"code": "X"}')
    change(db, "attempts", "ended_at = ended_at + interval '1 second'", "attempt = 2")
    assert moment() == ordered_at, "also after the next attempt has ended"
    app.retry(first.id)
    (third,) = db.claim("w1")
    db.start(third)
    (earlier, later) = app.explain(first.id).second_runs
    assert earlier.since == app.info(first.id).attempts[1].claimed_at, (
        "the row has only the time of the last request"
    )
    assert later.since is not None
    assert later.since > earlier.since


def test_explain_doctor_and_the_list_of_workers_name_the_same_last_beat(
    app: App, db: StoreHarness
) -> None:  # J10
    task = db.send()
    change(
        db,
        "tasks",
        "sent_at = sent_at - interval '4 hours', enqueued_at = enqueued_at - interval '4 hours'",
    )
    change(db, "workers", "started_at = started_at - interval '3 hours'")
    change(db, "supervisors", "last_beat_at = last_beat_at - interval '2 hours'")
    change(db, "workers", "last_beat_at = statement_timestamp() - interval '1 hour'", "id = 'w2'")
    reason = the_reason(app, task, ReasonCode.NO_WORKER)
    assert reason.since == max(each.last_heartbeat_at for each in app.list_workers())
    crew = db.run(diagnosis.crew(stale_ms=60_000))
    assert crew.last_beat_at == reason.since


def test_an_unknown_task_is_not_explained(app: App, db: StoreHarness) -> None:
    with pytest.raises(TaskNotFound, match="does not exist"):
        app.explain(uuid4())


def test_aexplain_returns_the_same_as_explain(app: App, db: StoreHarness) -> None:
    task = db.send()

    async def ask() -> Explanation:
        try:
            return await app.aexplain(task)
        finally:
            await app.aclose()

    twin, told = asyncio.run(ask()), app.explain(task)
    assert (twin.reasons, twin.second_runs, twin.state) == (told.reasons, told.second_runs, told.state)
    assert twin.at <= told.at
