"""Each reason why a task is not running: the situation is made on a real database, the reason is there; healed, it is gone."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

from everbeat import App, Explanation, Reason, RecoveryConfig, TaskNotFound, TaskState
from everbeat.domain.explanation import ReasonCode
from everbeat.store import workers
from tests.store.conftest import Hands

POISON = b'{"code": "WORKER_CRASHED", "data": {"poison": true}}'


def change(hands: Hands, table: str, setting: str, where: str = "true") -> None:
    hands.connection.execute(f"update {hands.target.schema}.{table} set {setting} where {where}")  # type: ignore[arg-type]


def codes(app: App, task_id: UUID) -> list[str]:
    return [reason.code for reason in app.explain(task_id).reasons]


def the_reason(app: App, task_id: UUID, code: ReasonCode) -> Reason:
    explanation = app.explain(task_id)
    (found,) = (reason for reason in explanation.reasons if reason.code is code)
    return found


def pause(hands: Hands, kind: str, name: str, **more: Any) -> None:
    values = {"kind": kind, "name": name, "paused_by": "ann", "reason": None, "crashes": None} | more
    hands.connection.execute(
        f"insert into {hands.target.schema}.pauses (kind, name, paused_by, reason, crashes)"  # type: ignore[arg-type]
        " values (%(kind)s, %(name)s, %(paused_by)s, %(reason)s, %(crashes)s)",
        values,
    )


def join(hands: Hands, worker: str, *, queues: list[str] | None = None, metadata: str | None = None) -> None:
    row = workers.WorkerRow(
        id=worker, supervisor_id="s1", hostname="host", pid=3, process_started=None, queues=queues, metadata=metadata,
    )  # fmt: skip
    hands.run(workers.register_worker(row))


def dismiss(hands: Hands, *names: str) -> None:
    hands.run(workers.bury_workers(worker_ids=names, how="test"))


class TestWaiting:
    def test_it_waits_for_its_turn(self, app: App, hands: Hands) -> None:
        first, second = hands.send(), hands.send()
        assert codes(app, first) == codes(app, second) == ["IN_LINE"]
        reason = the_reason(app, second, ReasonCode.IN_LINE)
        assert "1 due task of its queue before it, 2 live workers" in reason.text
        assert "no due tasks" in the_reason(app, first, ReasonCode.IN_LINE).text
        assert reason.since == app.info(second).enqueued_at
        assert app.info(second).waiting_because is None

    @pytest.mark.parametrize(("column", "largest"), [("fence", 2**63 - 1), ("attempt", 2**31 - 1)])
    def test_claims_pass_over_a_counter_without_a_next_value(
        self, app: App, hands: Hands, column: str, largest: int
    ) -> None:  # J9
        bad, next_one = (hands.send(serial="line") for _ in range(2))
        change(hands, "tasks", f"{column} = {largest}", f"id = '{bad}'")
        reason = the_reason(app, bad, ReasonCode.BAD_ROW)
        assert (reason.blocked_by, reason.command) == (column, "everbeat doctor")
        assert f"{column!r} is {largest}" in reason.text
        assert "set the column" in reason.text
        assert codes(app, next_one) == ["IN_LINE"], "the line goes on without it"
        assert [one.id for one in hands.claim()] == [next_one]
        change(hands, "tasks", f"{column} = 0", f"id = '{bad}'")
        assert "BAD_ROW" not in codes(app, bad)

    def test_a_worker_that_could_run_it_may_be_blocked(self, app: App, hands: Hands) -> None:
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
            hands.run(workers.record_states([state]))

        task = hands.send()
        told("w1", 5_000.0)
        told("w2", 900.0)
        two = the_reason(app, task, ReasonCode.IN_LINE).text
        assert two.endswith("2 live workers that could run it, of which 1 with a lagging event loop")
        dismiss(hands, "w2")
        one = the_reason(app, task, ReasonCode.IN_LINE).text
        assert one.endswith("1 live worker that could run it, whose event loop lags")
        told("w1", 3.0)
        assert "lag" not in the_reason(app, task, ReasonCode.IN_LINE).text

    def test_no_worker_lives(self, app: App, hands: Hands) -> None:
        task = hands.send()
        change(hands, "supervisors", "last_beat_at = last_beat_at - interval '1 hour'")
        reason = the_reason(app, task, ReasonCode.NO_WORKER)
        assert reason.since == app.list_supervisors()[0].last_heartbeat_at
        assert reason.command == "everbeat worker MODULE:APP"
        change(hands, "supervisors", "last_beat_at = statement_timestamp()")
        assert codes(app, task) == ["IN_LINE"]

    def test_live_supervisors_that_cannot_start_workers_are_named_if_nobody_can_run_it(  # J8
        self, app: App, hands: Hands
    ) -> None:
        hands.supervisor("s2")
        for name, problem in (("s1", "no module 'shop'"), ("s2", None)):
            hands.run(workers.record_starts(name, processes=2, problem=problem, age_ms=5_000))
        task = hands.send()
        assert codes(app, task) == ["IN_LINE"], "its worker that lives can run it"
        dismiss(hands, "w1", "w2")
        assert codes(app, task) == ["NO_WORKER", "WORKER_NOT_STARTED"]
        reason = the_reason(app, task, ReasonCode.WORKER_NOT_STARTED)
        assert "supervisor s1 (pid " in reason.text
        assert reason.text.endswith(" on host cannot start a worker process: no module 'shop'")
        assert reason.blocked_by == "s1"
        assert reason.since == app.list_supervisors()[1].start_problem_at
        change(hands, "supervisors", "last_beat_at = last_beat_at - interval '1 hour'")
        assert codes(app, task) == ["NO_WORKER"], "a dead supervisor starts nothing anyway"

    def test_nobody_serves_the_queue_or_knows_the_name(self, app: App, hands: Hands) -> None:
        dismiss(hands, "w1", "w2")
        join(hands, "w3", queues=["mails"], metadata='{"tasks": ["welcome", "work"]}')
        queue = the_reason(app, hands.send(queue="mail"), ReasonCode.QUEUE_NOT_SERVED)
        assert queue.text == "no live worker serves queue 'mail' (did you mean 'mails'?)"
        assert (queue.blocked_by, queue.command) == ("mail", "everbeat worker MODULE:APP --queues mail")
        name = the_reason(app, hands.send("welcom", queue="mails"), ReasonCode.NAME_UNKNOWN)
        assert name.text.endswith("knows task 'welcom' (did you mean 'welcome'?)")
        assert (name.blocked_by, name.command) == ("welcom", "everbeat check MODULE:APP")
        assert codes(app, hands.send(queue="mails")) == ["IN_LINE"]

    def test_it_is_scheduled(self, app: App, hands: Hands) -> None:
        task = hands.send(delay_ms=3_600_000)
        reason = the_reason(app, task, ReasonCode.SCHEDULED)
        info = app.info(task)
        assert (reason.since, reason.until) == (info.sent_at, info.enqueued_at)
        assert info.waiting_because == reason.text

    def test_its_retry_is_due_later_and_says_because_of_what(self, app: App, hands: Hands) -> None:
        claimed = hands.running(policy=b'{"max_retries": 5, "intervals": [60], "retry_for": ["SMTP_DOWN"]}')
        error = b'{"code": "SMTP_DOWN", "message": "no answer"}'
        assert hands.settle(claimed, "FAILED", error=error, retry_in_ms=60_000) == "PENDING"
        reason = the_reason(app, claimed.id, ReasonCode.RETRY_DUE_LATER)
        assert reason.text.startswith("retry 1 of 5 is due at ")
        assert reason.text.endswith("because attempt 1 failed: SMTP_DOWN: no answer")
        assert reason.until == app.info(claimed.id).next_retry_at

    def test_a_recovery_delays_it(self, app: App, hands: Hands) -> None:
        claimed = hands.running()
        (lease,) = hands.leases()
        hands.recover(lease, "retry", retry_in_ms=60_000)
        reason = the_reason(app, claimed.id, ReasonCode.RECOVERY_DELAYED)
        (recovery,) = app.recoveries(claimed.id)
        assert "worker w1, which ran it, died: vanished" in reason.text
        assert (reason.since, reason.until) == (recovery.noticed_at, recovery.next_retry_at)
        assert reason.command == f"everbeat recoveries show {recovery.id}"

    def test_it_is_paused(self, app: App, hands: Hands) -> None:
        task = hands.send(queue="mail")
        pause(hands, "task", "work", paused_by="brake", crashes=50, reason="it kills its workers")
        pause(hands, "queue", "mail")
        assert codes(app, task) == ["TASK_PAUSED", "QUEUE_PAUSED"]
        named = the_reason(app, task, ReasonCode.TASK_PAUSED)
        assert named.text == "task 'work' was paused by brake after 50 crashes: it kills its workers"
        assert (named.blocked_by, named.command) == ("work", "everbeat tasks resume work")
        queued = the_reason(app, task, ReasonCode.QUEUE_PAUSED)
        assert queued.text == "queue 'mail' was paused by ann"
        assert queued.command == "everbeat queues resume mail"
        assert queued.since is not None
        assert app.info(task).waiting_because == f"{named.text}; {queued.text}"
        hands.connection.execute(f"delete from {hands.target.schema}.pauses")  # type: ignore[arg-type]
        assert codes(app, task) == ["IN_LINE"]

    def test_a_serial_line_has_others_before_it(self, app: App, hands: Hands) -> None:
        first, second, third = (hands.send(serial="key:a") for _ in range(3))
        assert codes(app, first) == ["IN_LINE"]
        reason = the_reason(app, third, ReasonCode.SERIAL_LINE)
        assert reason.blocked_by == str(first)
        assert reason.command == f"everbeat explain {first}"
        assert "before it and is PENDING, with 1 more behind it" in reason.text
        (claimed,) = hands.claim("w1", limit=1)
        hands.start(claimed)
        assert "is RUNNING" in the_reason(app, second, ReasonCode.SERIAL_LINE).text
        hands.settle(claimed, "FAILED", error=b'{"code": "X"}', retry_in_ms=60_000)
        waits = the_reason(app, second, ReasonCode.SERIAL_LINE)
        assert "waits for its own time" in waits.text
        assert waits.until == app.info(first).next_retry_at
        app.cancel(first)
        assert codes(app, second) == ["IN_LINE"]
        app.cancel(second)
        app.cancel(third)

    def test_a_suspect_waits_for_a_process_of_its_own(self, app: App, hands: Hands) -> None:
        claimed = hands.running()
        (lease,) = hands.leases()
        hands.recover(lease, "retry")
        change(hands, "tasks", "suspect = true")
        change(hands, "recoveries", "suspect = true, cause = 'killed by SIGSEGV'")
        reason = the_reason(app, claimed.id, ReasonCode.SUSPECT)
        assert "worker w1, which ran it, died: killed by SIGSEGV" in reason.text
        assert reason.since == app.recoveries()[0].noticed_at
        other = hands.running("w2")
        change(hands, "tasks", "suspect = true", f"id = '{other.id}'")
        assert other.id == claimed.id  # first in first out: it is taken now
        assert codes(app, claimed.id) == ["RUNNING"]
        hands.settle(other, result=b"null")

    def test_all_slots_are_busy(self, app: App, hands: Hands) -> None:
        dismiss(hands, "w2")
        snapshot = workers.WorkerState(
            worker_id="w1", running=1, claimed=0, slots=1, rss_bytes=1, cpu_percent=0, loop_lag_ms=0
        )
        hands.run(workers.record_states([snapshot]))
        waiting = hands.send()
        assert codes(app, waiting) == ["IN_LINE"]
        running, _ = hands.claim("w1")[0], hands.send()
        hands.start(running)
        late = hands.send()
        reason = the_reason(app, late, ReasonCode.SLOTS_BUSY)
        assert "slots of the 1 live worker that could run it: 1 slot, all busy" in reason.text
        assert app.info(late).waiting_because is None
        hands.settle(running, result=b"null")
        assert codes(app, late) == ["IN_LINE"]

    def test_only_slots_of_its_own_lane_count(self, app: App, hands: Hands) -> None:
        dismiss(hands, "w1", "w2")
        lanes = '{"async": {"slots": 500, "tasks": ["quick"]}, "process": {"slots": 1, "tasks": ["work", "film"]}}'
        join(hands, "w3", metadata=f'{{"tasks": ["quick", "work", "film"], "lanes": {lanes}}}')
        hands.send("film")
        (film,) = hands.claim("w3", names=["film"])
        hands.start(film)
        assert codes(app, hands.send()) == ["SLOTS_BUSY"]
        assert codes(app, hands.send("quick")) == ["IN_LINE"]
        hands.settle(film, result=b"null")

    def test_its_deadline(self, app: App, hands: Hands) -> None:
        now = datetime.now(UTC)
        near = hands.send(good_until=now + timedelta(seconds=30))
        assert codes(app, near) == ["IN_LINE", "DEADLINE_NEAR"]
        assert the_reason(app, near, ReasonCode.DEADLINE_NEAR).until == now + timedelta(seconds=30)
        far = hands.send(good_until=now + timedelta(hours=1))
        assert codes(app, far) == ["IN_LINE"]
        never = hands.send(good_until=now + timedelta(hours=1), delay_ms=2 * 3_600_000)
        assert codes(app, never) == ["SCHEDULED", "DEADLINE_TOO_EARLY"]
        change(hands, "tasks", "good_until = sent_at", f"id = '{far}'")
        assert codes(app, far) == ["DEADLINE_PASSED"]
        assert "EXPIRED" in str(app.info(far).waiting_because)


class TestHeld:
    def test_it_runs(self, app: App, hands: Hands) -> None:
        claimed = hands.running(policy=b'{"timeout_ms": 60000, "stall_timeout_ms": 5000}')
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
            hands, "tasks", """progress = '{"stage": "pack", "fraction": 0.5}', progress_at = started_at + interval '2 s'"""
        )  # fmt: skip
        assert "progress: pack 50%" in the_reason(app, claimed.id, ReasonCode.RUNNING).text
        stands = the_reason(app, claimed.id, ReasonCode.PROGRESS_STANDS)
        assert stands.since == info.started_at + timedelta(seconds=2)
        app.cancel(claimed.id)
        assert codes(app, claimed.id) == ["RUNNING", "PROGRESS_STANDS", "CANCEL_REQUESTED"]
        hands.settle(claimed, "CANCELLED")

    def test_it_is_claimed_behind_others(self, app: App, hands: Hands) -> None:
        busy = hands.running()
        task = hands.send()
        hands.claim("w1")
        reason = the_reason(app, task, ReasonCode.CLAIMED)
        assert "when a slot is free: it runs 1 other task now" in reason.text
        assert (reason.since, reason.blocked_by) == (app.info(task).claimed_at, "w1")
        app.cancel(task)
        hands.settle(busy, result=b"null")

    def test_its_holder_is_silent(self, app: App, hands: Hands) -> None:
        hands.supervisor("s2", "w9")
        claimed = hands.running()
        past = "interval '100 s'"
        change(hands, "supervisors", f"last_beat_at = last_beat_at - {past}", "id = 's1'")
        change(
            hands,
            "tasks",
            f"sent_at = sent_at - {past}, claimed_at = claimed_at - {past}, started_at = started_at - {past}",
        )
        assert codes(app, claimed.id) == ["HOLDER_SILENT", "RUNNING"]
        reason = the_reason(app, claimed.id, ReasonCode.HOLDER_SILENT)
        assert reason.since is not None
        # running_stale_threshold_ms and one check_interval_ms after its last sign of life
        assert reason.until == reason.since + timedelta(seconds=300 + 30)
        assert (reason.blocked_by, reason.command) == ("w1", "everbeat sweep --dry-run")
        change(hands, "tasks", """flags = '{"infrastructure_resilient": true}'""")
        assert the_reason(app, claimed.id, ReasonCode.HOLDER_SILENT).until == reason.since + timedelta(
            seconds=930
        )
        change(hands, "supervisors", "last_beat_at = statement_timestamp()", "id = 's1'")
        assert codes(app, claimed.id) == ["RUNNING"]
        hands.settle(claimed, result=b"null")

    def test_nobody_recovers_it(self, database_url: str, schema: str, app: App, hands: Hands) -> None:
        claimed = hands.running()
        past = "interval '100 s'"
        change(hands, "supervisors", f"last_beat_at = last_beat_at - {past}")
        change(
            hands,
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
        hands.settle(claimed, result=b"null")

    def test_a_hook_left_it_to_its_holder(self, app: App, hands: Hands) -> None:
        hands.supervisor("s2", "w9")
        claimed = hands.running()
        change(hands, "tasks", "left_claim_id = claim_id, left_at = statement_timestamp()")
        assert codes(app, claimed.id) == ["RUNNING"]
        change(hands, "workers", "ended_at = statement_timestamp()", "id = 'w1'")
        assert codes(app, claimed.id) == ["HOLDER_ENDED", "HOOK_SKIPPED", "RUNNING"]
        ended = the_reason(app, claimed.id, ReasonCode.HOLDER_ENDED)
        assert "recovers" not in ended.text, "nobody does, by the hook's word"
        assert ended.until is None
        assert (
            "w1 (pid 2 on host) had begun attempt 1" in the_reason(app, claimed.id, ReasonCode.RUNNING).text
        )
        skipped = the_reason(app, claimed.id, ReasonCode.HOOK_SKIPPED)
        assert skipped.since == hands.row(claimed.id, "left_at")
        assert skipped.since is not None
        assert skipped.until == skipped.since + timedelta(seconds=30)  # check_interval_ms
        assert skipped.text.endswith("held by w1; after that the next sweep asks it again")
        change(hands, "tasks", "left_at = left_at - interval '31 s'")
        skipped = the_reason(app, claimed.id, ReasonCode.HOOK_SKIPPED)
        assert skipped.until is None
        assert skipped.text.endswith("it is due to be swept: the next sweep asks the hook again")
        change(hands, "tasks", "left_claim_id = gen_random_uuid()")  # an earlier holder's
        assert codes(app, claimed.id) == ["HOLDER_ENDED", "RUNNING"]
        change(hands, "workers", "ended_at = null", "id = 'w1'")
        hands.settle(claimed, result=b"null")

    def test_nobody_is_there_to_ask_the_hook_again(self, app: App, hands: Hands) -> None:
        claimed = hands.running()
        change(hands, "tasks", "left_claim_id = claim_id, left_at = statement_timestamp()")
        change(hands, "workers", "ended_at = statement_timestamp()", "id = 'w1'")
        assert codes(app, claimed.id) == ["HOLDER_ENDED", "HOOK_SKIPPED", "RUNNING"], (
            "its own supervisor does"
        )
        change(hands, "supervisors", "last_beat_at = last_beat_at - interval '1 hour'")
        assert codes(app, claimed.id) == ["HOLDER_ENDED", "HOOK_SKIPPED", "NOBODY_SWEEPS", "RUNNING"]
        skipped = the_reason(app, claimed.id, ReasonCode.HOOK_SKIPPED)
        assert skipped.until is None
        assert skipped.text.endswith("nobody is there to ask it again")
        change(hands, "workers", "ended_at = null", "id = 'w1'")
        hands.settle(claimed, result=b"null")

    def test_a_worker_that_lost_the_process_of_the_code_asks_the_hook_again(
        self, app: App, hands: Hands
    ) -> None:
        claimed = hands.running(policy=b'{"stall_timeout_ms": 5000}')
        change(hands, "tasks", "alone = true, left_claim_id = claim_id, left_at = statement_timestamp()")
        assert codes(app, claimed.id) == ["HOOK_SKIPPED", "RUNNING"]
        assert "after that its worker asks" in the_reason(app, claimed.id, ReasonCode.HOOK_SKIPPED).text
        assert "had begun attempt 1, alone" in the_reason(app, claimed.id, ReasonCode.RUNNING).text
        hands.settle(claimed, result=b"null")

    def test_what_is_due_is_promised_for_no_moment_that_is_past(self, app: App, hands: Hands) -> None:
        hands.supervisor("s2", "w9")
        claimed = hands.running()
        long_ago = "interval '2 hours'"
        change(
            hands,
            "tasks",
            f"sent_at = sent_at - {long_ago}, claimed_at = claimed_at - {long_ago}, started_at = started_at - {long_ago}",
        )
        change(hands, "supervisors", f"last_beat_at = last_beat_at - {long_ago}", "id = 's1'")
        silent = the_reason(app, claimed.id, ReasonCode.HOLDER_SILENT)
        assert silent.until is None
        assert silent.text.endswith("it is due, and the next look of a supervisor recovers it")
        change(hands, "workers", f"ended_at = statement_timestamp() - {long_ago}", "id = 'w1'")
        ended = the_reason(app, claimed.id, ReasonCode.HOLDER_ENDED)
        assert ended.until is None
        assert ended.text.endswith("it is due, and the next look of a supervisor recovers it")
        change(hands, "workers", "ended_at = null", "id = 'w1'")
        hands.settle(claimed, result=b"null")

    def test_its_holder_has_ended_or_was_never_registered(self, app: App, hands: Hands) -> None:
        hands.supervisor("s2", "w9")
        claimed = hands.running()
        change(
            hands, "workers", "ended_at = statement_timestamp(), ended_how = 'child_exit', ended_cause = 'killed by SIGKILL'", "id = 'w1'",
        )  # fmt: skip
        reason = the_reason(app, claimed.id, ReasonCode.HOLDER_ENDED)
        assert "has ended (killed by SIGKILL)" in reason.text
        change(hands, "workers", "ended_at = null", "id = 'w1'")
        change(hands, "tasks", "claimed_by_worker_id = 'ghost'")
        assert codes(app, claimed.id)[0] == "HOLDER_UNKNOWN"
        change(hands, "tasks", "claimed_by_worker_id = 'w1'")
        hands.settle(claimed, result=b"null")


class TestEnded:
    POLICY = b'{"max_retries": 1, "intervals": [1], "retry_for": ["X"]}'

    def test_how_it_ended(self, app: App, hands: Hands) -> None:
        done = hands.running()
        hands.settle(done, result=b"1")
        reason = the_reason(app, done.id, ReasonCode.COMPLETED)
        assert (reason.text, reason.since) == (
            "attempt 1 on worker w1 returned",
            app.info(done.id).completed_at,
        )
        gone = hands.send()
        app.cancel(gone)
        assert the_reason(app, gone, ReasonCode.CANCELLED).text == "it was cancelled before its code started"
        assert app.info(gone).error.message == "cancelled before its code started"  # type: ignore[union-attr]
        failed = hands.running(policy=self.POLICY)
        hands.settle(failed, "FAILED", error=b'{"code": "X"}', retry_in_ms=60_000)
        app.cancel(failed.id)
        assert the_reason(app, failed.id, ReasonCode.CANCELLED).text == (
            "it was cancelled before its code started again; attempt 1 on worker w1 was its last, and ended FAILED"
        )
        assert "started again" in app.info(failed.id).error.message  # type: ignore[union-attr]
        stopped = hands.running()
        app.cancel(stopped.id)
        hands.settle(stopped, "CANCELLED")
        assert the_reason(app, stopped.id, ReasonCode.CANCELLED).text == (
            "it was cancelled in attempt 1 on worker w1"
        )
        late = hands.send(good_until=datetime.now(UTC) - timedelta(seconds=1))
        hands.connection.execute(hands.text("task/expire"), {"limit": 10, "channel": hands.target.channel})
        assert codes(app, late) == ["EXPIRED"]

    @pytest.mark.parametrize(
        ("policy", "code", "again", "said"),
        [
            (None, b"X", False, "it has no retry policy"),
            (POLICY, b"Y", False, "its policy does not list this error for a retry"),
            (POLICY, b"X", True, "its 1 retries are used up"),
        ],
    )  # fmt: skip
    def test_why_it_was_not_run_again(
        self, app: App, hands: Hands, policy: bytes | None, code: bytes, again: bool, said: str
    ) -> None:
        claimed = hands.running(policy=policy)
        error = b'{"code": "%s"}' % code
        if again:
            hands.settle(claimed, "FAILED", error=error, retry_in_ms=0)
            (claimed,) = hands.claim("w1")
            hands.start(claimed)
        hands.settle(claimed, "FAILED", error=error)
        reason = the_reason(app, claimed.id, ReasonCode.FAILED)
        assert reason.text.endswith(said)
        assert reason.command == f"everbeat tasks retry {claimed.id}"

    def test_a_death_that_is_not_retried(self, app: App, hands: Hands) -> None:
        claimed = hands.running()
        (lease,) = hands.leases()
        hands.recover(lease, "fail")
        assert "on_crash='fail'" in the_reason(app, claimed.id, ReasonCode.FAILED).text
        crashed = hands.running()
        (lease,) = hands.leases()
        hands.recover(lease, "fail", outcome="CRASHED", error=POISON)
        assert the_reason(app, crashed.id, ReasonCode.FAILED).text.endswith(
            "; it has used up its crashes (1)"
        )
        lost = hands.running()
        (lease,) = hands.leases()
        hands.recover(lease, "fail", outcome="LOST", error=POISON)
        assert the_reason(app, lost.id, ReasonCode.FAILED).text.endswith("; it has used up its losses (1)")

    def test_a_sentence_of_an_error_ends_once(self, app: App, hands: Hands) -> None:
        claimed = hands.running()
        hands.settle(claimed, "FAILED", error=b'{"code": "X", "message": "no progress at all."}')
        text = the_reason(app, claimed.id, ReasonCode.FAILED).text
        assert text.endswith("X: no progress at all; it has no retry policy")


def test_every_second_run_has_its_reason(app: App, hands: Hands) -> None:
    claimed = hands.running(policy=b'{"max_retries": 3, "intervals": [1], "retry_for": ["X"]}')
    assert app.explain(claimed.id).second_runs == ()
    hands.settle(claimed, "FAILED", error=b'{"code": "X", "message": "down"}', retry_in_ms=0)
    assert [reason.code for reason in app.explain(claimed.id).second_runs] == ["RETRIED"]
    hands.claim("w1")
    (lease,) = hands.leases()
    hands.recover(lease, "requeue")
    (claimed,) = hands.claim("w2")
    hands.start(claimed)
    (lease,) = hands.leases()
    hands.recover(lease, "retry")
    change(hands, "recoveries", "charge = 'loss', suspect = true", "was = 'RUNNING'")
    (claimed,) = hands.claim("w1")
    hands.start(claimed)
    hands.settle(claimed, "RELEASED")
    (claimed,) = hands.claim("w2")
    hands.start(claimed)
    hands.settle(claimed, "FAILED", error=b'{"code": "Y"}')
    app.retry(claimed.id)
    (claimed,) = hands.claim("w2")
    hands.start(claimed)
    hands.settle(claimed, result=b"null")
    explanation = app.explain(str(claimed.id))
    assert [reason.code for reason in explanation.second_runs] == [
        "RETRIED", "RECOVERED", "RECOVERED", "HANDED_BACK", "RETRIED_BY_OPERATOR"
    ]  # fmt: skip
    failed, requeued, recovered, handed_back, retried = (reason.text for reason in explanation.second_runs)
    assert failed == "attempt 1 failed on worker w1: X: down"
    assert requeued.startswith("worker w1, which had claimed it, died before its code started: vanished")
    assert (
        "which ran attempt 2, died: vanished (noticed by age); charged as a loss; it is a suspect"
        in recovered
    )
    assert handed_back.startswith("attempt 3 was handed back, at no cost, by worker w1")
    change(hands, "recoveries", "noticed_by = 'progress', cause = 'no progress for 2s'", "was = 'RUNNING'")
    change(hands, "recoveries", "noticed_by = 'operator', cause = 'released'", "was = 'CLAIMED'")
    released, stalled = (reason.text for reason in app.explain(claimed.id).second_runs[1:3])
    assert released.startswith("worker w1, which held it, was released by an operator: released")
    assert stalled.startswith("its code stood still on worker w2: no progress for 2s")
    assert retried == "attempt 4 ended FAILED (Y), and an operator ran the task again"
    assert [reason.code for reason in explanation.reasons] == ["COMPLETED"]
    assert explanation.state is TaskState.COMPLETED


def test_an_unknown_task_is_not_explained(app: App, hands: Hands) -> None:
    with pytest.raises(TaskNotFound, match="does not exist"):
        app.explain(uuid4())


def test_the_twin_gives_the_same(app: App, hands: Hands) -> None:
    task = hands.send()

    async def ask() -> Explanation:
        try:
            return await app.aexplain(task)
        finally:
            await app.aclose()

    twin, told = asyncio.run(ask()), app.explain(task)
    assert (twin.reasons, twin.second_runs, twin.state) == (told.reasons, told.second_runs, told.state)
    assert twin.at <= told.at
