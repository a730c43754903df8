"""Steps, sleeps, waits and children in every mode: done once for good, under the fence, and refused in words."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from everbeat.domain.policy import StoredPolicy
from everbeat.runtime.events import LeasesLost
from everbeat.store.signals import send_signal
from everbeat.worker.protocol import Drain, Stop
from tests.worker.deeds import gate
from tests.worker.partial_deeds import effects
from tests.worker.stand import Running, Stand
from tests.worker.step_deeds import MODES

PROGRAM = [sys.executable, str(Path(__file__).parent / "programs" / "step_task_process.py")]


def send(stand: Stand, name: str, folder: Path, **more: Any) -> UUID:
    return stand.send(name, folder=str(folder), **more)


def signal(stand: Stand, task_id: UUID, value: bytes = b'{"a": 1}') -> str:
    channel = stand.target.channel
    return stand.run(
        send_signal(uuid4(), target=task_id, name="approved", value=value, channel=channel)
    ).verdict


async def ended(running: Running, *task_ids: UUID) -> dict[str, Any]:
    """Wait until all of these are terminal; answers the row of the first."""
    states = ("COMPLETED", "FAILED", "CANCELLED")
    await running.until(lambda: all(running.stand.task(each)["state"] in states for each in task_ids))
    return running.stand.task(task_ids[0])


async def suspended(running: Running, task_id: UUID) -> dict[str, Any]:
    """Wait until its last attempt has given its slot back."""

    def is_suspended() -> bool:
        row = running.stand.task(task_id)
        return row["state"] == "PENDING" and row["wake_at"] is not None

    await running.until(is_suspended)
    return running.stand.task(task_id)


def make_due(stand: Stand, task_id: UUID) -> None:
    """As if the time had passed."""
    for table, key, column in (("tasks", "id", "enqueued_at"), ("steps", "task_id", "due_at")):
        stand.query(
            f"update {{schema}}.{table} set {column} = now() where {key} = %s and {column} is not null returning 1",
            task_id,
        )
    stand.query("select pg_notify(%s, 't:default')", stand.target.channel)


def steps(stand: Stand, task_id: UUID) -> list[tuple[str, str, str]]:
    found = stand.query(
        "select kind, name, state from {schema}.steps where task_id = %s order by recorded_at, name", task_id
    )
    return [(row["kind"], row["name"], row["state"]) for row in found]


@pytest.mark.parametrize("mode", MODES)
async def test_a_rerun_does_no_step_again(stand: Stand, tmp_path: Path, mode: str) -> None:
    async with stand.worker(task_process_argv=PROGRAM) as running:
        task_id = send(stand, f"order_{mode}", tmp_path)
        row = await ended(running, task_id)
    assert effects(tmp_path) == ["charge 1", "charge 2", "pack", "once", "charge 3"]
    assert (row["state"], row["result"]) == ("COMPLETED", [1, 2, "packed", "Receipt", 2])
    third = "acharge" if "loop" in mode else "charge"
    names = [third, f"{third}#2", "wrap", f"{third}#3"]
    assert steps(stand, task_id) == [("step", name, "DONE") for name in names]


async def test_steps_side_by_side_are_told_apart_by_their_order(stand: Stand, tmp_path: Path) -> None:
    async with stand.worker() as running:
        task_id = send(stand, "step_side_by_side", tmp_path)
        row = await ended(running, task_id)
    assert row["result"] == [0, 1, 2, 3, 4]
    results = stand.query("select result from {schema}.steps where name = 'acharge#4'")
    assert results == [{"result": {"number": 3}}]


async def test_the_steps_inside_a_step_are_its_own(stand: Stand, tmp_path: Path) -> None:
    async with stand.worker() as running:
        task_id = send(stand, "nest", tmp_path)
        row = await ended(running, task_id)
    assert row["result"] == [3, 3, 3]
    assert effects(tmp_path) == [f"charge {number}" for number in (1, 2, 3, 1, 2)]
    assert {name for _, name, _ in steps(stand, task_id)} == {
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
        ("called", "'packed' is no step", True),
        ("name", "The name 'a#2' of a step", False),
        ("event", "The name 'a/b' of an event", False),
        ("type", "The type of event 'a'", False),
        ("child", "'echo' cannot be sent by task 'step_wrongly'", False),
    ],
)
async def test_what_cannot_be_kept_is_refused_in_words(
    stand: Stand, tmp_path: Path, what: str, message: str, is_called: bool
) -> None:
    async with stand.worker() as running:
        row = await ended(running, send(stand, "step_wrongly", tmp_path, what=what))
    assert row["state"] == "FAILED"
    assert "PayloadError" in row["error"]["type"]
    assert re.search(message, row["error"]["message"]), row["error"]["message"]
    assert (effects(tmp_path) != []) == is_called
    assert stand.query("select from {schema}.steps") == []


async def test_an_exception_passes_and_is_not_recorded(stand: Stand, tmp_path: Path) -> None:
    async with stand.worker() as running:
        row = await ended(running, send(stand, "step_wrongly", tmp_path, what="failing"))
    assert row["error"]["type"] == "ValueError"
    assert stand.query("select from {schema}.steps") == []


@pytest.mark.parametrize("what", ["step", "sleep", "wait_event", "send"])
async def test_the_blocking_forms_are_refused_on_a_loop(stand: Stand, tmp_path: Path, what: str) -> None:
    async with stand.worker() as running:
        row = await ended(running, send(stand, "step_on_the_loop", tmp_path, what=what))
    assert "BlockingCallInLoop" in row["error"]["type"]
    assert f"Context.{what}()" in row["error"]["message"]
    assert stand.query("select from {schema}.steps") == []


async def test_what_does_not_fit_its_annotation_any_more_is_told(stand: Stand, tmp_path: Path) -> None:
    async with stand.worker() as running:
        task_id = send(stand, "change_the_annotation", tmp_path)
        await running.until(lambda: stand.task(task_id)["retry_count"] == 1)
        stand.query("update {schema}.steps set result = '[]' returning 1")
        row = await ended(running, task_id)
    assert (
        "What step 'charge' of task 'change_the_annotation' recorded does not fit" in row["error"]["message"]
    )
    assert effects(tmp_path) == ["charge 1"]


async def test_a_lost_lease_records_nothing_and_stops_the_code(stand: Stand, tmp_path: Path) -> None:  # I2
    async with stand.worker() as running:
        task_id = send(stand, "two_steps_at_the_gate", tmp_path)
        await running.until(lambda: "begun" in gate.journal)
        stand.query(
            "update {schema}.tasks set claim_id = gen_random_uuid() where id = %s returning 1", task_id
        )
        gate.opened.set()
        await running.until(lambda: len(gate.journal) == 2)
        await running.until(lambda: bool(running.of(LeasesLost)))
        stand.query(
            "update {schema}.tasks set claim_id = null, state = 'FAILED' where id = %s returning 1", task_id
        )
        stand.query(
            "insert into {schema}.attempts (task_id, attempt, claim_id, fence, worker_id, claimed_at, started_at, outcome, will_retry)"
            " select id, 1, gen_random_uuid(), 1, 'w', now(), now(), 'FAILED', false from {schema}.tasks returning 1"
        )
    assert "its lease was lost" in gate.journal[1]
    assert [name for _, name, _ in steps(stand, task_id)] == ["charge"]


async def test_a_step_that_has_ended_is_recorded_before_a_cancel_stops_the_code(
    stand: Stand, tmp_path: Path
) -> None:
    async with stand.worker() as running:
        task_id = send(stand, "two_steps_at_the_gate", tmp_path)
        await running.until(lambda: "begun" in gate.journal)
        stand.cancel(task_id)
        await running.until(lambda: running.attempt(task_id).stopped == "cancelled")
        gate.opened.set()
        row = await ended(running, task_id)
    assert row["state"] == "CANCELLED"
    assert effects(tmp_path) == ["charge 1"], "nothing new is begun"


class TestSleep:
    @pytest.mark.parametrize("mode", MODES)
    async def test_a_long_sleep_holds_no_slot(self, stand: Stand, tmp_path: Path, mode: str) -> None:
        async with stand.worker(task_process_argv=PROGRAM) as running:
            task_id = send(stand, f"nap_{mode}", tmp_path, duration="1h")
            row = await suspended(running, task_id)
            await running.until(lambda: not running.held)
            assert (row["attempt"], row["retry_count"]) == (1, 0)
            assert all(one.occupied == 0 for one in running.worker._conductor.executors.values())
            make_due(stand, task_id)
            row = await ended(running, task_id)
        assert row["result"] == "attempt 2"
        assert effects(tmp_path) == ["pack", "woken"]
        assert [one["outcome"] for one in stand.attempts(task_id)] == ["SUSPENDED", "COMPLETED"]

    @pytest.mark.parametrize("mode", MODES)
    async def test_a_short_sleep_keeps_its_slot(self, stand: Stand, tmp_path: Path, mode: str) -> None:
        async with stand.worker(task_process_argv=PROGRAM) as running:
            row = await ended(running, send(stand, f"nap_{mode}", tmp_path, duration="300ms"))
        assert row["result"] == "attempt 1"
        due, done = stand.query(
            "select s.due_at, t.completed_at from {schema}.steps s, {schema}.tasks t where kind = 'sleep'"
        )[0].values()
        assert done >= due

    @pytest.mark.parametrize("mode", MODES)
    async def test_a_cancel_interrupts_it(self, stand: Stand, tmp_path: Path, mode: str) -> None:
        async with stand.worker(task_process_argv=PROGRAM) as running:
            task_id = send(stand, f"nap_{mode}", tmp_path, duration="4900ms")
            await running.until(lambda: ("sleep", "sleep", "DONE") in steps(stand, task_id))
            since = asyncio.get_running_loop().time()
            stand.cancel(task_id)
            row = await ended(running, task_id)
            assert asyncio.get_running_loop().time() - since < 3
        assert row["state"] == "CANCELLED"
        assert effects(tmp_path) == ["pack"]

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("grace_s", [0.0, 60.0])
    async def test_a_worker_that_is_told_to_stop_suspends_a_resting_task_at_once(
        self, stand: Stand, tmp_path: Path, mode: str, grace_s: float
    ) -> None:  # J1
        async with stand.worker(task_process_argv=PROGRAM) as running:
            arguments = {"folder": str(tmp_path), "duration": "4900ms"}
            policy = StoredPolicy(on_crash="fail").to_json()
            task_id = stand.send_with(f"nap_{mode}", arguments, policy=policy)
            await running.until(lambda: ("sleep", "sleep", "DONE") in steps(stand, task_id))
            since = asyncio.get_running_loop().time()
            running.worker.obey(Drain(round(grace_s * 1_000)) if grace_s else Stop())
            await running.left()
            assert asyncio.get_running_loop().time() - since < 3
        assert [one["outcome"] for one in stand.attempts(task_id)] == ["SUSPENDED"]
        row = stand.task(task_id)
        assert (row["state"], row["retry_count"]) == ("PENDING", 0)
        due = stand.query("select due_at from {schema}.steps where task_id = %s and kind = 'sleep'", task_id)
        assert row["enqueued_at"] == due[0]["due_at"], "it goes on when the sleep is over"
        make_due(stand, task_id)
        async with stand.worker(task_process_argv=PROGRAM) as running:
            row = await ended(running, task_id)
        assert row["result"] == "attempt 2"
        assert effects(tmp_path) == ["pack", "woken"], "the step before the sleep was not done again"

    async def test_code_that_swallows_its_suspension_ends_as_it_ends(
        self, stand: Stand, tmp_path: Path
    ) -> None:
        async with stand.worker() as running:
            row = await ended(running, send(stand, "swallow", tmp_path))
        assert (row["state"], row["result"]) == ("COMPLETED", "went on")

    async def test_a_suspension_that_nobody_asked_for_is_a_failure(
        self, stand: Stand, tmp_path: Path
    ) -> None:
        async with stand.worker() as running:
            row = await ended(running, send(stand, "pretend", tmp_path))
        assert row["state"] == "FAILED"
        assert "had not been told to give its slot back" in row["error"]["message"]

    async def test_a_part_of_the_code_suspends_the_whole(self, stand: Stand, tmp_path: Path) -> None:
        async with stand.worker() as running:
            task_id = send(stand, "sleep_in_a_group", tmp_path)
            await suspended(running, task_id)
        assert [one["outcome"] for one in stand.attempts(task_id)] == ["SUSPENDED"]

    async def test_one_that_is_cancelled_while_it_sleeps_ends_at_once(
        self, stand: Stand, tmp_path: Path
    ) -> None:
        async with stand.worker() as running:
            task_id = send(stand, "nap_on_loop", tmp_path, duration="1h")
            await suspended(running, task_id)
            stand.cancel(task_id)
            assert stand.task(task_id)["state"] == "CANCELLED"
            assert running.code is None


class TestEvents:
    @pytest.mark.parametrize("mode", MODES)
    async def test_a_signal_ends_the_wait_that_held_no_slot(
        self, stand: Stand, tmp_path: Path, mode: str
    ) -> None:
        async with stand.worker(task_process_argv=PROGRAM) as running:
            task_id = send(stand, f"hear_{mode}", tmp_path, timeout=None)
            row = await suspended(running, task_id)
            assert row["waits_for"] == "approved"
            await running.until(lambda: not running.held)
            assert signal(stand, task_id) == "stored"
            row = await ended(running, task_id)
        assert row["result"] == {"a": 1}
        assert effects(tmp_path) == ["waits", "waits", "heard"]

    async def test_one_that_came_before_is_had_at_once(self, stand: Stand, tmp_path: Path) -> None:
        async with stand.worker() as running:
            task_id = send(stand, "hear_at_the_gate", tmp_path)
            await running.until(lambda: "begun" in gate.journal)
            signal(stand, task_id, b"3")
            gate.opened.set()
            row = await ended(running, task_id)
        assert (row["result"], row["attempt"]) == (3, 1)

    @pytest.mark.parametrize("mode", MODES)
    async def test_a_timeout_is_an_error_with_a_code(self, stand: Stand, tmp_path: Path, mode: str) -> None:
        async with stand.worker(task_process_argv=PROGRAM) as running:
            task_id = send(stand, f"hear_{mode}", tmp_path, timeout="1h")
            await suspended(running, task_id)
            make_due(stand, task_id)
            row = await ended(running, task_id)
        assert (row["state"], row["error"]["code"]) == ("FAILED", "EVENT_TIMEOUT")
        assert row["error"]["data"] == {"event": "approved", "timeout_s": 3600.0}
        assert effects(tmp_path) == ["waits", "waits"]

    async def test_a_timeout_can_be_caught(self, stand: Stand, tmp_path: Path) -> None:
        async with stand.worker() as running:
            row = await ended(running, send(stand, "patient", tmp_path))
        assert row["result"] == "EVENT_TIMEOUT approved {'event': 'approved', 'timeout_s': 0.0}"

    async def test_a_value_of_another_type_is_told(self, stand: Stand, tmp_path: Path) -> None:
        async with stand.worker() as running:
            task_id = send(stand, "hear_in_thread", tmp_path, timeout=None)
            await suspended(running, task_id)
            signal(stand, task_id, b'{"a": "one"}')
            row = await ended(running, task_id)
        assert (
            "The value of event 'approved' of task 'hear_in_thread' is not of the type"
            in row["error"]["message"]
        )

    @pytest.mark.parametrize("name", ["hear_twice", "hear_side_by_side"])
    async def test_each_signal_is_had_once_and_in_order(
        self, stand: Stand, tmp_path: Path, name: str
    ) -> None:
        async with stand.worker() as running:
            task_id = send(stand, name, tmp_path)
            await suspended(running, task_id)
            signal(stand, task_id, b"1")
            await running.until(lambda: stand.task(task_id)["attempt"] >= 2)
            await suspended(running, task_id)
            signal(stand, task_id, b"2")
            row = await ended(running, task_id)
        assert row["result"] == [1, 2]

    async def test_a_signal_that_is_being_stored_while_the_code_begins_to_wait(
        self, stand: Stand, tmp_path: Path
    ) -> None:
        """The first look waits for the signal's lock and is older than what it brings: only the second one sees it."""
        async with stand.worker() as running:
            task_id = send(stand, "hear_at_the_gate", tmp_path)
            await running.until(lambda: "begun" in gate.journal)
            with stand.target.connect("somebody else") as connection:
                connection.execute("begin")
                connection.execute(
                    f"select \"{stand.target.schema}\".send_signal(%s, %s, 'approved', '5', 'c')",  # type: ignore[arg-type]
                    [uuid4(), task_id],
                )
                gate.opened.set()
                await running.until(lambda: bool(stand.query(
                    "select from pg_stat_activity where wait_event_type = 'Lock' and query like '%%waits_for%%'"
                )))  # fmt: skip
                connection.execute("commit")
            row = await ended(running, task_id)
        assert (row["result"], row["attempt"]) == (5, 1)


class TestChildren:
    @pytest.mark.parametrize("mode", MODES)
    async def test_each_is_sent_once_in_all_attempts(self, stand: Stand, tmp_path: Path, mode: str) -> None:
        async with stand.worker(task_process_argv=PROGRAM) as running:
            task_id = send(stand, f"beget_{mode}", tmp_path)
            row = await ended(running, task_id)
            ids = [UUID(each) for each in row["result"]]
            await ended(running, *ids)
        found = stand.query(
            "select id, name, result, parent_id from {schema}.tasks where parent_id is not null"
        )
        assert {one["id"] for one in found} == set(ids)
        assert {one["parent_id"] for one in found} == {task_id}
        assert [stand.task(each)["result"] for each in ids] == ["1", "2", 2]
