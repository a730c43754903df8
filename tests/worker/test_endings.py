"""Test RetryLater, Cancel and `retries_left` in every mode: what the rows, the history and the children show."""

from __future__ import annotations

import pickle
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from psycopg import sql

from everbeat import Cancel, RateLimited, RetryLater
from everbeat.errors import ConfigurationError
from everbeat.protocol import Drain
from everbeat.runtime.events import event_text
from everbeat.runtime.failure_log import TaskRetry
from tests.variants import long_except
from tests.worker import sample_endings
from tests.worker.effects import effects
from tests.worker.harness import Running, WorkerHarness
from tests.worker.run_modes import SOME_MODES
from tests.worker.sample_steps import MODES
from tests.worker.sample_tasks import gate
from tests.worker.test_steps import PROGRAM, ended, send

assert sample_endings
SINGLE: dict[str, Any] = {"thread_concurrency": 1, "async_concurrency": 1, "process_concurrency": 1}


def history(harness: WorkerHarness, task_id: UUID) -> list[tuple[str, bool, str | None]]:
    """Return the outcome, `will_retry` and the message of each attempt."""
    return [
        (row["outcome"], row["will_retry"], None if row["error"] is None else row["error"]["message"])
        for row in harness.attempts(task_id)
    ]


async def postponed(running: Running, task_id: UUID, *, attempts: int = 1) -> dict[str, Any]:
    """Wait until this many attempts of the task have ended."""
    await running.until(lambda: len(running.harness.attempts(task_id)) >= attempts)
    return running.harness.task(task_id)


@pytest.mark.parametrize("mode", SOME_MODES)
async def test_code_that_raises_retry_later_runs_again_without_a_retry(
    harness: WorkerHarness, tmp_path: Path, mode: str
) -> None:
    async with harness.worker(task_process_argv=PROGRAM) as running:
        task_id = send(harness, f"busy_{mode}", tmp_path, until=2)
        row = await ended(running, task_id)
    assert (row["state"], row["result"], row["retry_count"], row["error"]) == ("COMPLETED", "done", 0, None)
    later = ("SUSPENDED", True, "the server is busy")
    assert history(harness, task_id) == [later, later, ("COMPLETED", False, None)]
    first, second, _ = harness.attempts(task_id)
    assert second["started_at"] - first["ended_at"] >= timedelta(milliseconds=50)
    assert first["error"]["code"] == "RETRY_LATER"
    assert first["error"]["type"] == "everbeat.RetryLater"


@pytest.mark.parametrize("mode", long_except(["in_thread", "in_process"], "in_thread"))
async def test_retry_later_at_a_moment_makes_the_task_due_then(
    harness: WorkerHarness, tmp_path: Path, mode: str
) -> None:
    async with harness.worker(task_process_argv=PROGRAM) as running:
        task_id = send(harness, f"busy_{mode}", tmp_path, kind="at")
        row = await postponed(running, task_id)
    assert row["state"] == "PENDING"
    assert row["enqueued_at"] == row["next_retry_at"]
    assert timedelta(minutes=59) < row["enqueued_at"] - datetime.now(UTC) < timedelta(minutes=61)
    assert (row["error"]["code"], row["error"]["message"]) == ("RETRY_LATER", "closed")
    assert (row["wake_at"], row["claim_id"], row["started_at"]) == (None, None, None)


async def test_a_moment_that_has_passed_makes_the_task_due_now(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    async with harness.worker() as running:
        task_id = send(harness, "busy_on_loop", tmp_path, kind="past")
        await ended(running, task_id)
    first, second = harness.attempts(task_id)
    assert harness.task(task_id)["enqueued_at"] == first["ended_at"]
    assert second["outcome"] == "COMPLETED"


async def test_a_task_fails_after_max_retry_later_postponed_attempts(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    async with harness.worker() as running:
        task_id = send(harness, "busy_twice_in_thread", tmp_path, until=99)
        row = await ended(running, task_id)
        assert (row["state"], row["error"]["code"]) == ("FAILED", "RETRY_LATER_EXHAUSTED")
        assert row["error"]["message"] == (
            "The task was to run again later after each of 2 earlier attempts, and its limit is 2. the server is busy"
        )
        assert [(outcome, again) for outcome, again, _ in history(harness, task_id)] == [
            ("SUSPENDED", True), ("SUSPENDED", True), ("FAILED", False)
        ]  # fmt: skip
        assert row["failed_at"] is not None
        harness.retry(task_id)  # new budgets
        await postponed(running, task_id, attempts=4)
        row = await ended(running, task_id)
    assert [outcome for outcome, *_ in history(harness, task_id)][3:] == ["SUSPENDED", "SUSPENDED", "FAILED"]


async def test_a_task_fails_if_its_good_until_passes_before_the_chosen_time(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    soon = datetime.now(UTC) + timedelta(minutes=30)
    async with harness.worker() as running:
        args = {"folder": str(tmp_path), "kind": "at"}
        row = await ended(running, harness.send_with("busy_in_thread", args, good_until=soon))
    assert (row["state"], row["error"]["code"]) == ("FAILED", "RETRY_LATER_EXHAUSTED")
    assert row["error"]["message"].startswith("The good_until of the task passes before")


@pytest.mark.parametrize("mode", ["in_process", "on_loop"])
async def test_retry_later_that_counts_costs_a_retry_and_fails_when_none_is_left(
    harness: WorkerHarness, tmp_path: Path, mode: str
) -> None:
    async with harness.worker(task_process_argv=PROGRAM) as running:
        task_id = send(harness, f"busy_twice_{mode}", tmp_path, kind="counts", until=99)
        row = await ended(running, task_id)
    assert (row["state"], row["retry_count"], row["error"]["code"]) == ("FAILED", 2, "RETRY_LATER_EXHAUSTED")
    assert "but its 2 retries are used up" in row["error"]["message"]
    assert [outcome for outcome, *_ in history(harness, task_id)] == ["FAILED"] * 3
    assert effects(tmp_path) == [f"attempt {number}, retries left {3 - number}" for number in (1, 2, 3)]


async def test_retry_later_that_counts_logs_the_moment_of_the_next_attempt(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    async with harness.worker() as running:
        task_id = send(harness, "busy_twice_in_thread", tmp_path, kind="counts at")
        await running.finished(task_id)
    (told,) = running.of(TaskRetry)
    assert told.retry_in_s is None
    assert told.run_at is not None
    assert told.run_at == harness.task(task_id)["enqueued_at"]
    assert "retry_in_s" not in event_text(told)
    assert f"run_at={told.run_at.isoformat()}" in event_text(told)


@pytest.mark.parametrize("mode", SOME_MODES)
async def test_retries_left_is_none_without_a_retry_policy(
    harness: WorkerHarness, tmp_path: Path, mode: str
) -> None:
    async with harness.worker(task_process_argv=PROGRAM) as running:
        await ended(running, send(harness, f"busy_{mode}", tmp_path, until=0))
    assert effects(tmp_path) == ["attempt 1, retries left None"]


async def test_a_group_that_contains_only_retry_later_postpones_the_task(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    async with harness.worker() as running:
        task_id = send(harness, "busy_on_loop", tmp_path, kind="group")
        assert (await ended(running, task_id))["state"] == "COMPLETED"
        mixed = send(harness, "busy_on_loop", tmp_path, kind="mixed")
        row = await ended(running, mixed)
    assert history(harness, task_id)[0] == ("SUSPENDED", True, "first")
    assert (row["state"], row["error"]["code"]) == ("FAILED", "UNHANDLED_EXCEPTION")


async def test_an_invalid_time_fails_the_attempt_with_the_rule(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    async with harness.worker() as running:
        row = await ended(running, send(harness, "busy_on_loop", tmp_path, kind="wrong"))
    assert (row["state"], row["error"]["type"]) == ("FAILED", "everbeat.errors.ConfigurationError")
    assert "RetryLater.after" in row["error"]["message"]


async def test_the_retry_policy_of_a_step_ignores_retry_later(harness: WorkerHarness, tmp_path: Path) -> None:
    async with harness.worker() as running:
        task_id = send(harness, "busy_step", tmp_path)
        row = await ended(running, task_id)
    assert (row["state"], row["result"]) == ("COMPLETED", "done")
    assert history(harness, task_id)[0] == ("SUSPENDED", True, "the step is busy")
    assert harness.query("select count(*) as n from {schema}.steps where kind = 'sleep'") == [{"n": 0}]


async def test_a_cancel_request_is_stronger_than_retry_later(harness: WorkerHarness, tmp_path: Path) -> None:
    async with harness.worker() as running:
        task_id = send(harness, "busy_when_opened", tmp_path)
        await running.until(lambda: gate.journal == ["began"])
        harness.cancel(task_id)
        gate.opened.set()
        row = await ended(running, task_id)
    assert (row["state"], row["error"]["code"]) == ("CANCELLED", "TASK_CANCELLED")


async def test_a_shutdown_keeps_the_time_that_the_code_chose(harness: WorkerHarness, tmp_path: Path) -> None:
    async with harness.worker() as running:
        task_id = send(harness, "busy_when_stopped", tmp_path)
        await running.until(lambda: gate.journal == ["began"])
        running.worker.obey(Drain(100))
        await running.left()
    assert history(harness, task_id) == [("SUSPENDED", True, "stopped")]
    assert harness.task(task_id)["enqueued_at"] - datetime.now(UTC) > timedelta(minutes=59)


@pytest.mark.parametrize("mode", MODES)
async def test_code_that_raises_cancel_ends_its_task_as_cancelled(
    harness: WorkerHarness, tmp_path: Path, mode: str
) -> None:
    async with harness.worker(task_process_argv=PROGRAM) as running:
        task_id = send(harness, f"withdraw_{mode}", tmp_path)
        row = await ended(running, task_id)
    assert (row["state"], row["retry_count"]) == ("CANCELLED", 0)
    assert row["cancelled_at"] is not None
    assert row["error"]["code"] == "TASK_CANCELLED"
    assert row["error"]["message"] == "the order was withdrawn"
    assert history(harness, task_id) == [("CANCELLED", False, "the order was withdrawn")]
    assert effects(tmp_path) == ["withdraw"]


@pytest.mark.parametrize("kind", long_except(sample_endings.BROKEN, "unreadable"))
@pytest.mark.parametrize("mode", SOME_MODES)
async def test_an_ending_that_cannot_be_read_fails_its_attempt_and_frees_the_slot(
    harness: WorkerHarness, mode: str, kind: str
) -> None:
    async with harness.worker(task_process_argv=PROGRAM, **SINGLE) as running:
        row = await ended(running, harness.send(f"broken_{mode}", kind=kind))
        assert (row["state"], row["error"]["code"]) == ("FAILED", "UNHANDLED_EXCEPTION")
        assert row["error"]["type"] == f"tests.worker.sample_endings.{sample_endings.BROKEN[kind].__name__}"
        assert "cannot decide how the attempt ends" in row["error"]["traceback"]
        again = await ended(running, harness.send(f"broken_{mode}", kind=kind))
    assert again["state"] == "FAILED"


@pytest.mark.parametrize("mode", SOME_MODES)
async def test_a_subclass_of_cancel_need_not_call_the_init_of_cancel(
    harness: WorkerHarness, mode: str
) -> None:
    async with harness.worker(task_process_argv=PROGRAM) as running:
        row = await ended(running, harness.send(f"withdrawn_{mode}"))
    assert (row["state"], row["error"]["message"]) == ("CANCELLED", "cancelled by its own code")
    assert row["error"]["type"] == "tests.worker.sample_endings.Withdrawn"


async def test_cancel_also_cancels_the_children_of_the_task(harness: WorkerHarness, tmp_path: Path) -> None:
    async with harness.worker() as running:
        row = await ended(running, send(harness, "withdraw_with_child", tmp_path))
        (child,) = effects(tmp_path)
        await running.until(lambda: harness.task(UUID(child))["state"] == "CANCELLED")
    assert row["error"]["message"] == "no children either"


SEEN_AT_THE_END = """
create table {schema}.seen (state text);
create function {schema}.see() returns trigger language plpgsql as $$
begin
    insert into {schema}.seen select 'child ' || t.state from {schema}.tasks t where t.parent_id = new.id;
    insert into {schema}.seen select 'workflow ' || w.state from {schema}.workflows w where w.parent_task_id = new.id;
    return new;
end $$;
create trigger see after update on {schema}.tasks
    for each row when (old.state = 'RUNNING' and new.state = 'CANCELLED') execute function {schema}.see()
"""


async def test_the_end_of_a_task_that_raised_cancel_is_stored_after_its_children_were_cancelled(
    harness: WorkerHarness,
) -> None:
    """A worker can be killed at any point, so the order of the two writes decides."""
    schema = sql.Identifier(harness.target.schema)
    harness.connection.execute(sql.SQL(SEEN_AT_THE_END).format(schema=schema))
    async with harness.worker() as running:
        await ended(running, harness.send("withdraw_after_starting"))
    seen = {row["state"] for row in harness.query("select state from {schema}.seen")}
    assert seen <= {"child CANCELLED", "workflow CANCELLING", "workflow CANCELLED", "workflow COMPLETED"}
    assert len(seen) == 2


async def test_a_task_that_raised_cancel_ends_only_when_its_children_could_be_cancelled(
    harness: WorkerHarness, caplog: pytest.LogCaptureFixture
) -> None:
    table = sql.Identifier(harness.target.schema, "workflows")
    rename = sql.SQL("alter table {} rename to {}")
    async with harness.worker() as running:
        task_id = harness.send("withdraw_when_opened")
        await running.until(lambda: gate.journal == ["began"])
        harness.connection.execute(rename.format(table, sql.Identifier("gone")))
        gate.opened.set()
        await running.until(lambda: "cancelling_children_failed" in caplog.text)
        assert harness.task(task_id)["state"] == "RUNNING"
        gone = sql.Identifier(harness.target.schema, "gone")
        harness.connection.execute(rename.format(gone, sql.Identifier("workflows")))
        row = await ended(running, task_id)
    assert (row["state"], row["error"]["message"]) == ("CANCELLED", "opened")
    children = harness.query("select state from {schema}.tasks where parent_id = %s", task_id)
    assert children == [{"state": "CANCELLED"}]


def test_retry_later_rejects_arguments_that_give_no_time() -> None:
    for wrong in (
        {},
        {"after": 1, "at": datetime.now(UTC)},
        {"after": -1},
        {"at": datetime.now(UTC).replace(tzinfo=None)},
    ):
        with pytest.raises(ConfigurationError, match=r"RetryLater\.(after|at)"):
            RetryLater(**wrong)  # type: ignore[arg-type]


def copied(exception: Exception) -> Any:
    """Return the exception as a process pool would deliver it."""
    return pickle.loads(pickle.dumps(exception))  # noqa: S301 - our own data


def test_retry_later_and_cancel_can_be_pickled() -> None:
    later = copied(RetryLater("30s", counts=True, reason="busy"))
    assert (later.after_s, later.at, later.counts, str(later)) == (30.0, None, True, "busy")
    assert str(copied(Cancel("gone"))) == "gone"


def test_endings_show_what_they_were_given() -> None:
    moment = datetime(2030, 1, 1, tzinfo=UTC)
    assert repr(RetryLater("30s")) == "RetryLater(after='30s')"
    assert repr(RetryLater(at=moment, counts=True)) == f"RetryLater(at={moment!r}, counts=True)"
    assert repr(RateLimited("a", retry_after=1)) == "RateLimited(limit='a', retry_after='1s')"
    assert repr(RateLimited("a", "1m", reason="429")) == (
        "RateLimited(limit='a', retry_after='1m', reason='429')"
    )
    assert repr(Cancel("gone")) == "Cancel(reason='gone')"


def test_the_reason_of_an_ending_is_a_text_and_an_empty_one_is_none() -> None:
    three: Any = 3
    with pytest.raises(ConfigurationError, match=r"Cancel\.reason = 3"):
        Cancel(three)
    with pytest.raises(ConfigurationError, match=r"RetryLater\.reason = 3"):
        RetryLater("1s", reason=three)
    with pytest.raises(ConfigurationError, match=r"RateLimited\.reason = 3"):
        RateLimited("a", "1s", reason=three)
    assert Cancel("").reason is None
    assert str(Cancel("")) == "cancelled by its own code"


async def test_retry_later_that_counts_names_a_missing_retry_policy(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    async with harness.worker() as running:
        row = await ended(running, send(harness, "busy_on_loop", tmp_path, kind="counts"))
    assert "which costs a retry, but the task has no retry policy" in row["error"]["message"]


def test_counts_of_retry_later_must_be_true_or_false() -> None:
    for wrong in ("no", 1, None):
        with pytest.raises(ConfigurationError, match=r"RetryLater\.counts = .* must be True or False"):
            RetryLater("1s", counts=wrong)  # type: ignore[arg-type]
