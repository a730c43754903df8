"""Test steps, sleeps, waits and child tasks in every mode: recorded once, under the lease, refused with a reason."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from everbeat.domain.task.policy import StoredPolicy
from everbeat.protocol import Drain, Stop
from everbeat.runtime.events import LeasesLost
from everbeat.store.tasks import send_signal
from everbeat.worker.attempt import SUSPEND_PATIENCE_S
from tests.worker.effects import effects
from tests.worker.harness import Running, WorkerHarness
from tests.worker.proxy import statement_marker
from tests.worker.run_modes import SOME_MODES
from tests.worker.sample_steps import MODES
from tests.worker.sample_tasks import gate

PROGRAM = [sys.executable, str(Path(__file__).parent / "programs" / "step_task_process.py")]


def send(harness: WorkerHarness, name: str, folder: Path, **more: Any) -> UUID:
    return harness.send(name, folder=str(folder), **more)


def signal(harness: WorkerHarness, task_id: UUID, value: bytes = b'{"a": 1}') -> str:
    channel = harness.target.channel
    return harness.run(
        send_signal(uuid4(), target=task_id, name="approved", value=value, channel=channel)
    ).verdict


async def ended(running: Running, *task_ids: UUID) -> dict[str, Any]:
    """Wait until all of these tasks have ended; return the row of the first."""
    states = ("COMPLETED", "FAILED", "CANCELLED")
    await running.until(lambda: all(running.harness.task(each)["state"] in states for each in task_ids))
    return running.harness.task(task_ids[0])


async def suspended(running: Running, task_id: UUID) -> dict[str, Any]:
    """Wait until the last attempt of the task is suspended and its slot is free."""

    def is_suspended() -> bool:
        row = running.harness.task(task_id)
        return row["state"] == "PENDING" and row["wake_at"] is not None

    await running.until(is_suspended)
    return running.harness.task(task_id)


def make_due(harness: WorkerHarness, task_id: UUID) -> None:
    """Make the task due, as if the time had passed."""
    for table, key, column in (("tasks", "id", "enqueued_at"), ("steps", "task_id", "due_at")):
        harness.query(
            f"update {{schema}}.{table} set {column} = now() where {key} = %s and {column} is not null returning 1",
            task_id,
        )
    harness.query("select pg_notify(%s, 't:default')", harness.target.channel)


def steps(harness: WorkerHarness, task_id: UUID) -> list[tuple[str, str, str]]:
    found = harness.query(
        "select kind, name, state from {schema}.steps where task_id = %s order by recorded_at, name", task_id
    )
    return [(row["kind"], row["name"], row["state"]) for row in found]


@pytest.mark.parametrize("mode", MODES)
async def test_the_next_attempt_does_not_repeat_recorded_steps(
    harness: WorkerHarness, tmp_path: Path, mode: str
) -> None:
    async with harness.worker(task_process_argv=PROGRAM) as running:
        task_id = send(harness, f"order_{mode}", tmp_path)
        row = await ended(running, task_id)
    assert effects(tmp_path) == ["charge 1", "charge 2", "pack", "once", "charge 3"]
    assert (row["state"], row["result"]) == ("COMPLETED", [1, 2, "packed", "Receipt", 2])
    third = "acharge" if "loop" in mode else "charge"
    names = [third, f"{third}#2", "wrap", f"{third}#3"]
    assert steps(harness, task_id) == [("step", name, "DONE") for name in names]


async def test_concurrent_steps_are_recorded_by_their_order(harness: WorkerHarness, tmp_path: Path) -> None:
    async with harness.worker() as running:
        task_id = send(harness, "step_side_by_side", tmp_path)
        row = await ended(running, task_id)
    assert row["result"] == [0, 1, 2, 3, 4]
    results = harness.query("select result from {schema}.steps where name = 'acharge#4'")
    assert results == [{"result": {"number": 3}}]


async def test_inner_steps_are_recorded_under_their_outer_step(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    async with harness.worker() as running:
        task_id = send(harness, "nest", tmp_path)
        row = await ended(running, task_id)
    assert row["result"] == [3, 3, 3]
    assert effects(tmp_path) == [f"charge {number}" for number in (1, 2, 3, 1, 2)]
    assert {name for _, name, _ in steps(harness, task_id)} == {
        "both", "both#1/charge", "both#1/charge#2", "charge", "both#2", "both#2/charge", "both#2/charge#2"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("what", "message", "is_called"),
    [
        ("unrecordable", "The result of step 'unrecordable' of task 'step_wrongly' .*set", True),
        ("unreadable", "step 'unreadable' .* cannot be recorded: its annotation cannot be read", False),
        ("uncarried", "step 'uncarried' .* cannot be recorded: its annotation", False),
        ("large", "The result of step 'large' .* takes 1,100,002 bytes", True),
        ("async", "Step 'acharge' .* is an async function", False),
        ("lambda", "has no name", False),
        ("called", "'packed' cannot be a step", True),
        ("name", "The name 'a#2' of a step", False),
        ("event", "The name 'a/b' of an event", False),
        ("type", "The type of event 'a'", False),
        ("child", "'echo' cannot be sent by task 'step_wrongly'", False),
    ],
)
async def test_a_step_whose_result_cannot_be_stored_is_refused(
    harness: WorkerHarness, tmp_path: Path, what: str, message: str, is_called: bool
) -> None:
    async with harness.worker() as running:
        row = await ended(running, send(harness, "step_wrongly", tmp_path, what=what))
    assert row["state"] == "FAILED"
    assert "PayloadError" in row["error"]["type"]
    assert re.search(message, row["error"]["message"]), row["error"]["message"]
    assert (effects(tmp_path) != []) == is_called
    assert harness.query("select from {schema}.steps") == []


async def test_a_step_raises_its_exception_and_does_not_record_it(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    async with harness.worker() as running:
        row = await ended(running, send(harness, "step_wrongly", tmp_path, what="failing"))
    assert row["error"]["type"] == "ValueError"
    assert harness.query("select from {schema}.steps") == []


@pytest.mark.parametrize("what", ["step", "sleep", "wait_event", "send"])
async def test_blocking_steps_sleeps_and_waits_are_refused_on_an_event_loop(
    harness: WorkerHarness, tmp_path: Path, what: str
) -> None:
    async with harness.worker() as running:
        row = await ended(running, send(harness, "step_on_the_loop", tmp_path, what=what))
    assert "BlockingCallInLoop" in row["error"]["type"]
    assert f"Context.{what}()" in row["error"]["message"]
    assert harness.query("select from {schema}.steps") == []


async def test_a_recorded_result_that_no_longer_fits_its_annotation_fails_the_attempt(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    async with harness.worker() as running:
        task_id = send(harness, "change_the_annotation", tmp_path)
        await running.until(lambda: harness.task(task_id)["retry_count"] == 1)
        harness.query("update {schema}.steps set result = '[]' returning 1")
        row = await ended(running, task_id)
    assert (
        "The recorded result of step 'charge' of task 'change_the_annotation' no longer fits"
        in row["error"]["message"]
    )
    assert effects(tmp_path) == ["charge 1"]


async def test_a_task_that_lost_its_lease_records_no_step_and_is_stopped(
    harness: WorkerHarness, tmp_path: Path
) -> None:  # I2
    async with harness.worker() as running:
        task_id = send(harness, "two_steps_at_the_gate", tmp_path)
        await running.until(lambda: "begun" in gate.journal)
        harness.query(
            "update {schema}.tasks set claim_id = gen_random_uuid() where id = %s returning 1", task_id
        )
        gate.opened.set()
        await running.until(lambda: len(gate.journal) == 2)
        await running.until(lambda: bool(running.of(LeasesLost)))
        harness.query(
            "update {schema}.tasks set claim_id = null, state = 'FAILED' where id = %s returning 1", task_id
        )
        harness.query(
            "insert into {schema}.attempts (task_id, attempt, claim_id, fence, worker_id, claimed_at, started_at, outcome, will_retry)"
            " select id, 1, gen_random_uuid(), 1, 'w', now(), now(), 'FAILED', false from {schema}.tasks returning 1"
        )
    assert "its lease was lost" in gate.journal[1]
    assert [name for _, name, _ in steps(harness, task_id)] == ["charge"]


async def test_a_finished_step_is_recorded_before_a_cancel_stops_the_code(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    async with harness.worker() as running:
        task_id = send(harness, "two_steps_at_the_gate", tmp_path)
        await running.until(lambda: "begun" in gate.journal)
        harness.cancel(task_id)
        await running.until(lambda: running.attempt(task_id).stopped == "cancelled")
        gate.opened.set()
        row = await ended(running, task_id)
    assert row["state"] == "CANCELLED"
    assert effects(tmp_path) == ["charge 1"], "no further step must begin"


class TestSleep:
    @pytest.mark.parametrize("mode", SOME_MODES)
    async def test_a_long_sleep_holds_no_slot(
        self, harness: WorkerHarness, tmp_path: Path, mode: str
    ) -> None:
        async with harness.worker(task_process_argv=PROGRAM) as running:
            task_id = send(harness, f"nap_{mode}", tmp_path, duration="1h")
            row = await suspended(running, task_id)
            await running.until(lambda: not running.held)
            assert (row["attempt"], row["retry_count"]) == (1, 0)
            assert all(one.occupied == 0 for one in running.worker._executors.values())
            make_due(harness, task_id)
            row = await ended(running, task_id)
        assert row["result"] == "attempt 2"
        assert effects(tmp_path) == ["pack", "woken"]
        assert [one["outcome"] for one in harness.attempts(task_id)] == ["SUSPENDED", "COMPLETED"]

    @pytest.mark.parametrize("mode", SOME_MODES)
    async def test_a_short_sleep_keeps_its_slot(
        self, harness: WorkerHarness, tmp_path: Path, mode: str
    ) -> None:
        async with harness.worker(task_process_argv=PROGRAM) as running:
            row = await ended(running, send(harness, f"nap_{mode}", tmp_path, duration="300ms"))
        assert row["result"] == "attempt 1"
        due, done = harness.query(
            "select s.due_at, t.completed_at from {schema}.steps s, {schema}.tasks t where kind = 'sleep'"
        )[0].values()
        assert done >= due

    @pytest.mark.parametrize("mode", SOME_MODES)
    async def test_a_cancel_interrupts_a_short_sleep(
        self, harness: WorkerHarness, tmp_path: Path, mode: str
    ) -> None:
        async with harness.worker(task_process_argv=PROGRAM) as running:
            task_id = send(harness, f"nap_{mode}", tmp_path, duration="4900ms")
            await running.until(lambda: ("sleep", "sleep", "DONE") in steps(harness, task_id))
            since = asyncio.get_running_loop().time()
            harness.cancel(task_id)
            row = await ended(running, task_id)
            assert asyncio.get_running_loop().time() - since < 3
        assert row["state"] == "CANCELLED"
        assert effects(tmp_path) == ["pack"]

    @pytest.mark.parametrize("mode", SOME_MODES)
    @pytest.mark.parametrize("grace_s", [0.0, 60.0])
    async def test_a_stopped_worker_suspends_a_sleeping_task_at_once(
        self, harness: WorkerHarness, tmp_path: Path, mode: str, grace_s: float
    ) -> None:  # J1
        async with harness.worker(task_process_argv=PROGRAM) as running:
            arguments = {"folder": str(tmp_path), "duration": "4900ms"}
            policy = StoredPolicy(on_crash="fail").to_json()
            task_id = harness.send_with(f"nap_{mode}", arguments, policy=policy)
            await running.until(lambda: ("sleep", "sleep", "DONE") in steps(harness, task_id))
            since = asyncio.get_running_loop().time()
            running.worker.obey(Drain(round(grace_s * 1_000)) if grace_s else Stop())
            await running.left()
            assert asyncio.get_running_loop().time() - since < 3
        assert [one["outcome"] for one in harness.attempts(task_id)] == ["SUSPENDED"]
        row = harness.task(task_id)
        assert (row["state"], row["retry_count"]) == ("PENDING", 0)
        due = harness.query(
            "select due_at from {schema}.steps where task_id = %s and kind = 'sleep'", task_id
        )
        assert row["enqueued_at"] == due[0]["due_at"], "the task continues when the sleep is over"
        make_due(harness, task_id)
        async with harness.worker(task_process_argv=PROGRAM) as running:
            row = await ended(running, task_id)
        assert row["result"] == "attempt 2"
        assert effects(tmp_path) == ["pack", "woken"], "the step before the sleep must not be repeated"

    @pytest.mark.parametrize("what", ["4900ms", "1h", "wait"])
    async def test_a_stop_while_a_sleep_is_being_recorded_suspends_the_task(
        self, harness: WorkerHarness, tmp_path: Path, what: str
    ) -> None:  # J1
        async with harness.worker() as running:
            arguments = {"folder": str(tmp_path), "what": what}
            policy = StoredPolicy(on_crash="fail").to_json()
            task_id = harness.send_with("rest_at_the_gate", arguments, policy=policy)
            await running.until(lambda: "begun" in gate.journal)
            with harness.holding("lock table {schema}.steps in exclusive mode"):
                gate.opened.set()
                await running.until(lambda: bool(harness.query(
                    "select from pg_stat_activity where wait_event_type = 'Lock' and query like '%%wake_at%%'"
                )))  # fmt: skip
                running.worker.obey(Stop())
                await asyncio.sleep(0.1)  # the stop must happen before the record is written
            await running.left()
        assert [one["outcome"] for one in harness.attempts(task_id)] == ["SUSPENDED"]
        assert (harness.task(task_id)["state"], len(steps(harness, task_id))) == ("PENDING", 1)

    @pytest.mark.parametrize(("hangs", "outcome"), [(False, "SUSPENDED"), (True, "FAILED")])
    async def test_a_stop_waits_for_code_that_suspends_itself_for_a_limited_time(
        self, harness: WorkerHarness, tmp_path: Path, hangs: bool, outcome: str
    ) -> None:  # J1
        async with harness.worker() as running:
            arguments = {"folder": str(tmp_path), "hangs": hangs}
            policy = StoredPolicy(on_crash="fail").to_json()
            task_id = harness.send_with("leave_slowly", arguments, policy=policy)
            await running.until(lambda: ("sleep", "sleep", "DONE") in steps(harness, task_id))
            since = asyncio.get_running_loop().time()
            running.worker.obey(Stop())
            await running.left()
            assert asyncio.get_running_loop().time() - since < 3 * SUSPEND_PATIENCE_S
        assert effects(tmp_path) == ["told"]
        assert [one["outcome"] for one in harness.attempts(task_id)] == [outcome]

    async def test_code_that_catches_its_suspension_completes(
        self, harness: WorkerHarness, tmp_path: Path
    ) -> None:
        async with harness.worker() as running:
            row = await ended(running, send(harness, "swallow", tmp_path))
        assert (row["state"], row["result"]) == ("COMPLETED", "went on")

    async def test_a_suspension_raised_by_user_code_fails_the_attempt(
        self, harness: WorkerHarness, tmp_path: Path
    ) -> None:
        async with harness.worker() as running:
            row = await ended(running, send(harness, "pretend", tmp_path))
        assert row["state"] == "FAILED"
        assert "which only Context.sleep and Context.wait_event can do" in row["error"]["message"]

    async def test_a_sleep_in_a_task_group_suspends_the_whole_task(
        self, harness: WorkerHarness, tmp_path: Path
    ) -> None:
        async with harness.worker() as running:
            task_id = send(harness, "sleep_in_a_group", tmp_path)
            await suspended(running, task_id)
        assert [one["outcome"] for one in harness.attempts(task_id)] == ["SUSPENDED"]

    async def test_a_suspended_task_is_cancelled_at_once(
        self, harness: WorkerHarness, tmp_path: Path
    ) -> None:
        async with harness.worker() as running:
            task_id = send(harness, "nap_on_loop", tmp_path, duration="1h")
            await suspended(running, task_id)
            harness.cancel(task_id)
            assert harness.task(task_id)["state"] == "CANCELLED"
            assert running.code is None


class TestEvents:
    @pytest.mark.parametrize("mode", SOME_MODES)
    async def test_a_signal_resumes_a_task_that_waits_without_a_slot(
        self, harness: WorkerHarness, tmp_path: Path, mode: str
    ) -> None:
        async with harness.worker(task_process_argv=PROGRAM) as running:
            task_id = send(harness, f"await_event_{mode}", tmp_path, timeout=None)
            row = await suspended(running, task_id)
            assert row["waits_for"] == "approved"
            await running.until(lambda: not running.held)
            assert signal(harness, task_id) == "stored"
            row = await ended(running, task_id)
        assert row["result"] == {"a": 1}
        assert effects(tmp_path) == ["waits", "waits", "heard"]

    async def test_a_signal_sent_before_the_wait_is_received_at_once(
        self, harness: WorkerHarness, tmp_path: Path
    ) -> None:
        async with harness.worker() as running:
            task_id = send(harness, "await_event_at_the_gate", tmp_path)
            await running.until(lambda: "begun" in gate.journal)
            signal(harness, task_id, b"3")
            gate.opened.set()
            row = await ended(running, task_id)
        assert (row["result"], row["attempt"]) == (3, 1)

    @pytest.mark.parametrize("mode", SOME_MODES)
    async def test_a_wait_event_timeout_fails_with_the_code_event_timeout(
        self, harness: WorkerHarness, tmp_path: Path, mode: str
    ) -> None:
        async with harness.worker(task_process_argv=PROGRAM) as running:
            task_id = send(harness, f"await_event_{mode}", tmp_path, timeout="1h")
            await suspended(running, task_id)
            make_due(harness, task_id)
            row = await ended(running, task_id)
        assert (row["state"], row["error"]["code"]) == ("FAILED", "EVENT_TIMEOUT")
        assert row["error"]["data"] == {"event": "approved", "timeout_s": 3600.0}
        assert effects(tmp_path) == ["waits", "waits"]

    async def test_a_wait_event_timeout_can_be_caught(self, harness: WorkerHarness, tmp_path: Path) -> None:
        async with harness.worker() as running:
            row = await ended(running, send(harness, "patient", tmp_path))
        assert row["result"] == "EVENT_TIMEOUT approved {'event': 'approved', 'timeout_s': 0.0}"

    async def test_a_signal_value_of_another_type_fails_the_attempt(
        self, harness: WorkerHarness, tmp_path: Path
    ) -> None:
        async with harness.worker() as running:
            task_id = send(harness, "await_event_in_thread", tmp_path, timeout=None)
            await suspended(running, task_id)
            signal(harness, task_id, b'{"a": "one"}')
            row = await ended(running, task_id)
        assert (
            "The value of event 'approved' of task 'await_event_in_thread' is not of the expected type"
            in row["error"]["message"]
        )

    @pytest.mark.parametrize("name", ["await_event_twice", "await_event_side_by_side"])
    async def test_each_signal_is_received_once_and_in_order(
        self, harness: WorkerHarness, tmp_path: Path, name: str
    ) -> None:
        async with harness.worker() as running:
            task_id = send(harness, name, tmp_path)
            await suspended(running, task_id)
            signal(harness, task_id, b"1")
            await running.until(lambda: harness.task(task_id)["attempt"] >= 2)
            await suspended(running, task_id)
            signal(harness, task_id, b"2")
            row = await ended(running, task_id)
        assert row["result"] == [1, 2]

    async def test_a_signal_that_is_stored_while_the_wait_begins_is_received(
        self, harness: WorkerHarness, tmp_path: Path
    ) -> None:
        """The first query waits for the lock of the signal with an older snapshot: only the second query sees the signal."""
        async with harness.worker() as running:
            task_id = send(harness, "await_event_at_the_gate", tmp_path)
            await running.until(lambda: "begun" in gate.journal)
            with harness.target.connect("somebody else") as connection:
                connection.execute("begin")
                connection.execute(
                    f"select \"{harness.target.schema}\".send_signal(%s, %s, 'approved', '5', 'c')",  # type: ignore[arg-type]
                    [uuid4(), task_id],
                )
                gate.opened.set()
                await running.until(lambda: bool(harness.query(
                    "select from pg_stat_activity where wait_event_type = 'Lock' and query like %s",
                    f"{statement_marker('step/wait_for_signal').decode()}%",
                )))  # fmt: skip
                connection.execute("commit")
            row = await ended(running, task_id)
        assert (row["result"], row["attempt"]) == (5, 1)


class TestChildren:
    @pytest.mark.parametrize("mode", SOME_MODES)
    async def test_each_child_task_is_sent_once_in_all_attempts(
        self, harness: WorkerHarness, tmp_path: Path, mode: str
    ) -> None:
        async with harness.worker(task_process_argv=PROGRAM) as running:
            task_id = send(harness, f"send_child_{mode}", tmp_path)
            row = await ended(running, task_id)
            ids = [UUID(each) for each in row["result"]]
            await ended(running, *ids)
        found = harness.query(
            "select id, name, result, parent_id from {schema}.tasks where parent_id is not null"
        )
        assert {one["id"] for one in found} == set(ids)
        assert {one["parent_id"] for one in found} == {task_id}
        assert [harness.task(each)["result"] for each in ids] == ["1", "2", 2]
