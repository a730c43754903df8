"""Test the identity of steps: a step with other arguments never gets the result recorded for the first ones."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID, uuid4

import pytest

from everbeat.store import tasks
from tests.variants import long_except
from tests.worker.effects import effects
from tests.worker.harness import Running, WorkerHarness
from tests.worker.run_modes import SOME_MODES
from tests.worker.test_steps import PROGRAM, ended, send, steps


def retry(harness: WorkerHarness, task_id: UUID) -> None:
    """Retry the task as an operator does."""
    answer = harness.run(tasks.retry(task_id, channel=harness.target.channel, call=uuid4()))
    assert answer is not None
    assert answer.retried, "the task must run again"


async def failed_once(running: Running, task_id: UUID) -> None:
    """Wait until the first attempt has failed."""
    await running.until(lambda: running.harness.task(task_id)["retry_count"] == 1)


@pytest.mark.parametrize("mode", SOME_MODES)
async def test_a_step_with_other_arguments_fails_and_a_retry_with_fitting_code_continues(
    harness: WorkerHarness, tmp_path: Path, mode: str
) -> None:  # J5
    async with harness.worker(task_process_argv=PROGRAM) as running:
        task_id = send(harness, f"change_arguments_{mode}", tmp_path, numbers=[2, 7, 2])
        row = await ended(running, task_id)
        name = "acharge" if "loop" in mode else "charge"
        assert (row["state"], row["error"]["code"]) == ("FAILED", "NON_DETERMINISTIC"), row["error"]
        assert "NonDeterministic" in row["error"]["type"]
        data = row["error"]["data"]
        assert (data["step"], data["kind"]) == (f"{name}#2", "step")
        assert data["recorded"] != data["given"]
        for text in (f"Step '{name}#2'", data["recorded"][:8], data["given"][:8], "ctx.named"):
            assert text in row["error"]["message"]
        assert [each for _, each, _ in steps(harness, task_id)] == [name, f"{name}#2"], (
            "the recorded steps are kept"
        )
        assert effects(tmp_path) == ["charge 1", "charge 2"], "the other step must not be called"
        retry(harness, task_id)
        row = await ended(running, task_id)
    assert (row["state"], row["result"]) == ("COMPLETED", [1, 2, 3])
    assert effects(tmp_path) == ["charge 1", "charge 2"]


async def test_a_reordered_step_is_reported_with_its_recorded_name(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    async with harness.worker() as running:
        row = await ended(running, send(harness, "change_arguments_in_thread", tmp_path, numbers=[2, 1]))
    assert row["error"]["code"] == "NON_DETERMINISTIC"
    assert "These are the arguments that were recorded for 'charge'." in row["error"]["message"]


async def test_a_recorded_step_without_an_argument_digest_fits_any_arguments(
    harness: WorkerHarness, tmp_path: Path
) -> None:  # J3
    async with harness.worker() as running:
        task_id = send(harness, "change_arguments_in_thread", tmp_path, numbers=[2, 7])
        await failed_once(running, task_id)
        harness.query("delete from {schema}.steps where name = 'charge#2' returning 1")
        harness.query(  # the statement of version 11
            "insert into {schema}.steps (task_id, kind, name, result, attempt)"
            " values (%s, 'step', 'charge#2', %s, 1) returning 1",
            task_id,
            '{"number": 40}',
        )
        row = await ended(running, task_id)
    assert (row["state"], row["result"]) == ("COMPLETED", [1, 40, 2])


async def test_concurrent_steps_are_numbered_in_the_order_in_which_they_begin(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    async with harness.worker() as running:
        row = await ended(running, send(harness, "gather_twice", tmp_path))
    assert (row["state"], row["result"], row["attempt"]) == ("COMPLETED", [0, 1, 2, 3, 4], 2)


@pytest.mark.parametrize(
    "how",
    long_except(["return", "gather", "raise", "step", "sleep", "send", "commit"], "return", "gather", "send"),
)
async def test_code_that_catches_non_deterministic_cannot_continue(
    harness: WorkerHarness, tmp_path: Path, how: str
) -> None:
    async with harness.worker() as running:
        row = await ended(running, send(harness, "swallow_on_loop", tmp_path, how=how))
    assert (row["state"], row["error"]["code"]) == ("FAILED", "NON_DETERMINISTIC"), row
    assert effects(tmp_path) == ["charge 1"]
    assert harness.query("select from {schema}.tasks where parent_id is not null") == []


async def test_a_child_task_with_other_arguments_is_refused(harness: WorkerHarness, tmp_path: Path) -> None:
    async with harness.worker() as running:
        task_id = send(harness, "send_another_child", tmp_path)
        row = await ended(running, task_id)
    assert (row["state"], row["error"]["code"]) == ("FAILED", "NON_DETERMINISTIC")
    assert "Child 'echo' of task 'send_another_child' has other arguments" in row["error"]["message"]
    assert len(harness.query("select from {schema}.tasks where parent_id = %s", task_id)) == 1


async def test_a_recorded_sleep_or_wait_keeps_its_first_duration(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    async with harness.worker() as running:
        row = await ended(running, send(harness, "wait_otherwise", tmp_path))
    assert (row["state"], row["result"]) == ("COMPLETED", "went on")


@pytest.mark.parametrize("mode", SOME_MODES)
async def test_code_that_catches_non_deterministic_fails_its_attempt_in_every_mode(
    harness: WorkerHarness, tmp_path: Path, mode: str
) -> None:
    async with harness.worker(task_process_argv=PROGRAM) as running:
        row = await ended(running, send(harness, f"swallow_{mode}", tmp_path, how="return"))
    assert (row["state"], row["error"] and row["error"]["code"]) == ("FAILED", "NON_DETERMINISTIC"), row
    assert effects(tmp_path) == ["charge 1"]


async def test_concurrent_flows_get_their_own_step_results_in_any_order(
    harness: WorkerHarness, tmp_path: Path
) -> None:  # J5
    async with harness.worker() as running:
        task_id = send(harness, "flow_side_by_side", tmp_path, numbers=[[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]])
        row = await ended(running, task_id)
    assert (row["state"], row["result"]) == ("COMPLETED", [f"{n}: {n}" for n in range(5)]), row["error"]
    assert sorted(effects(tmp_path)) == [f"charge {n}" for n in range(5)], (
        "each step must run once although the task ran twice"
    )


async def test_a_flow_with_other_arguments_does_not_get_the_result_of_another_flow(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    async with harness.worker() as running:
        task_id = send(harness, "flow_side_by_side", tmp_path, numbers=[[0, 1, 2], [0, 6, 2]])
        row = await ended(running, task_id)
    assert (row["state"], row["result"]) == ("COMPLETED", ["0: 0", "6: 6", "2: 2"]), row["error"]


async def test_steps_in_threads_of_a_task_get_their_own_results(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    async with harness.worker() as running:
        row = await ended(running, send(harness, "step_in_threads", tmp_path))
    assert (row["state"], row["result"]) == ("COMPLETED", [0, 1, 2, 3, 4]), row["error"]
    assert sorted(effects(tmp_path)) == [f"charge {n}" for n in range(5)]


async def test_steps_that_an_earlier_version_recorded_by_number_are_found(
    harness: WorkerHarness, tmp_path: Path
) -> None:  # J3
    async with harness.worker() as running:
        task_id = send(harness, "flow_side_by_side", tmp_path, numbers=[[0, 1, 2], [0, 1, 2]])
        await failed_once(running, task_id)
        harness.query("delete from {schema}.steps where name like 'acharge%%' returning 1")
        for number in (1, 2, 3):
            harness.query(  # the statement of version 11
                "insert into {schema}.steps (task_id, kind, name, result, attempt) values (%s, 'step', %s, %s, 1) returning 1",
                task_id,
                "acharge" if number == 1 else f"acharge#{number}",
                f'{{"number": {39 + number}}}',
            )
        row = await ended(running, task_id)
    assert row["state"] == "COMPLETED", row["error"]
    assert sorted(each.partition(": ")[2] for each in row["result"]) == ["40", "41", "42"]
