"""Test RateLimited in every mode: the task runs again, and no other task of the limit, or of the key, starts before."""

from __future__ import annotations

import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import msgspec
import pytest

from everbeat import RateLimited
from everbeat.errors import ConfigurationError
from everbeat.runtime.failure_log import TaskFailure
from everbeat.store.leases import Settlement, settle, settle_telling
from tests.store.conftest import StoreHarness
from tests.store.conftest import db as store_db
from tests.worker import sample_endings
from tests.worker.harness import WorkerHarness
from tests.worker.run_modes import SOME_MODES
from tests.worker.test_steps import PROGRAM, ended

assert sample_endings
db = store_db


def send(harness: WorkerHarness, mode: str, folder: Path, *, gate: str = "stripe", **arguments: Any) -> UUID:
    given = {"folder": str(folder), **arguments}
    return harness.send_with(f"refused_{mode}", given, gates=f'{{"{gate}"}}')


@pytest.mark.parametrize("mode", SOME_MODES)
async def test_a_task_that_raises_rate_limited_closes_its_limit_and_runs_again_without_a_retry(
    harness: WorkerHarness, tmp_path: Path, mode: str
) -> None:  # K4
    harness.query("insert into {schema}.limits (name, concurrency) values ('stripe', 1) returning name")
    first = send(harness, mode, tmp_path)
    second = send(harness, mode, tmp_path, until=0)
    async with harness.worker(task_process_argv=PROGRAM) as running:
        await ended(running, first, second)
    refused, again = harness.attempts(first)
    (other,) = harness.attempts(second)
    assert (refused["outcome"], refused["error"]["code"]) == ("SUSPENDED", "RATE_LIMITED")
    assert refused["error"]["message"] == "The rate of limit 'stripe' is reached: status 429"
    assert refused["error"]["type"] == "everbeat.RateLimited"
    assert again["outcome"] == other["outcome"] == "COMPLETED"
    closed_until = refused["ended_at"] + timedelta(milliseconds=600)
    assert min(again["started_at"], other["started_at"]) >= closed_until
    assert harness.task(first)["retry_count"] == 0


async def test_only_the_key_of_the_task_is_closed(harness: WorkerHarness, tmp_path: Path) -> None:
    harness.query("insert into {schema}.limits (name, concurrency) values ('stripe', 1) returning name")
    refused = send(harness, "on_loop", tmp_path, gate="stripe/acme", after="1h")
    async with harness.worker() as running:
        await running.until(lambda: len(harness.attempts(refused)) == 1)
        same = send(harness, "on_loop", tmp_path, gate="stripe/acme", until=0)
        other = send(harness, "on_loop", tmp_path, gate="stripe/other", until=0)
        await ended(running, other)
    assert harness.task(same)["state"] == "PENDING"


async def test_a_task_that_is_rate_limited_too_often_fails(harness: WorkerHarness, tmp_path: Path) -> None:
    task_id = send(harness, "on_loop", tmp_path, until=9, after="50ms")
    async with harness.worker() as running:
        row = await ended(running, task_id)
        await running.finished(task_id)
        await running.until(lambda: bool(running.of(TaskFailure)))
    assert (row["state"], row["error"]["code"]) == ("FAILED", "RETRY_LATER_EXHAUSTED")
    assert len(harness.attempts(task_id)) == 3
    (told,) = running.of(TaskFailure)
    assert (told.code, told.message, told.type) == tuple(
        row["error"][name] for name in ("code", "message", "type")
    )


@pytest.mark.parametrize("gates", [None, '{"other/acme","queue:default"}'])
async def test_a_task_that_names_a_limit_it_does_not_have_fails_at_once(
    harness: WorkerHarness, tmp_path: Path, gates: str | None
) -> None:
    task_id = harness.send_with("refused_on_loop", {"folder": str(tmp_path)}, gates=gates)
    async with harness.worker() as running:
        row = await ended(running, task_id)
    assert (row["state"], row["error"]["code"], row["retry_count"]) == ("FAILED", "UNKNOWN_LIMIT", 0)
    listed = "none" if gates is None else "other, queue:default"
    assert row["error"]["message"] == (
        "The code raised RateLimited for limit 'stripe', which is not a limit of this task."
        f" The task has: {listed}. Fix: name one of these limits, or add the limit to the limits of the task."
    )
    (attempt,) = harness.attempts(task_id)
    assert (attempt["outcome"], attempt["will_retry"]) == ("FAILED", False)
    (told,) = running.of(TaskFailure)
    assert (told.code, told.message) == ("UNKNOWN_LIMIT", row["error"]["message"])
    assert harness.query(
        "select count(*) as n from {schema}.line_changes where closed_until is not null"
    ) == [{"n": 0}]


def test_a_repeated_settlement_for_an_unknown_limit_gives_the_same_answer(db: StoreHarness) -> None:
    db.send()
    (claimed,) = db.claim(starts=1)
    error = msgspec.json.encode({"code": "RATE_LIMITED", "message": "", "data": {"limit": "stripe"}})
    settlement = Settlement(
        id=claimed.id, claim_id=claimed.claim_id, outcome="POSTPONED", error=error, retry_in_ms=1, most_postponed=9
    )  # fmt: skip
    done = uuid4()
    other = Settlement(id=done, claim_id=done, outcome="FAILED", error=b"{}")
    first, second = [db.run(settle_telling([other, settlement], channel=db.target.channel)) for _ in range(2)]
    assert (first[0][claimed.claim_id], second[0][claimed.claim_id]) == ("FAILED", "already")
    assert first[1] == second[1]
    stored = db.row(claimed.id, "error")
    assert stored["code"] == "UNKNOWN_LIMIT"
    assert {key: msgspec.json.decode(error) for key, error in first[1].items()} == {claimed.claim_id: stored}


def test_a_repeated_settlement_closes_the_gate_only_once(db: StoreHarness) -> None:
    db.connection.execute(db.plain("insert into {schema}.limits (name, concurrency) values ('stripe', 5)"))
    db.send(gates='{"stripe"}')
    (claimed,) = db.claim(starts=1)
    error = msgspec.json.encode({"code": "RATE_LIMITED", "message": "", "data": {"limit": "stripe"}})
    settlement = Settlement(
        id=claimed.id,
        claim_id=claimed.claim_id,
        outcome="POSTPONED",
        error=error,
        retry_in_ms=60_000,
        most_postponed=9,
    )
    statement = settle([settlement], channel=db.target.channel)
    assert [db.run(statement), db.run(statement)] == [
        {claimed.claim_id: "PENDING"},
        {claimed.claim_id: "already"},
    ]
    assert len([row for row in db.table("line_changes", "closed_until") if row[0] is not None]) == 1
    later = db.send(gates='{"stripe"}')
    assert db.claim(starts=5) == []
    assert [
        row[0] for row in db.table("gates", "closed_until > extract(epoch from statement_timestamp())")
    ] == [True]
    assert db.row(later, "state") in ("PENDING", ("PENDING",))


def test_rate_limited_can_be_pickled_and_checks_its_arguments() -> None:
    copied = pickle.loads(pickle.dumps(RateLimited("stripe", retry_after="30s", reason="429")))  # noqa: S301 - made by this test
    assert (copied.limit, copied.after_s, copied.reason, str(copied)) == (
        "stripe",
        30.0,
        "429",
        "The rate of limit 'stripe' is reached: 429",
    )
    with pytest.raises(ConfigurationError, match=r"RateLimited\.retry_after"):
        RateLimited("stripe", retry_after="soon")
    with pytest.raises(ConfigurationError, match=r"RateLimited\.limit"):
        RateLimited(7, retry_after="1s")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"RateLimited\.limit = ''"):
        RateLimited("", retry_after="1s")
    for wrong in (0, -1, "-1s"):
        with pytest.raises(ConfigurationError, match=r"RateLimited\.retry_after"):
            RateLimited("stripe", retry_after=wrong)
