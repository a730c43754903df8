"""The trigger that sends failure handlers: one task for each final failure, in the transaction of any statement that ends a task."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import sql

from everbeat.errors import EverbeatError
from everbeat.store import diagnosis, expiry, tasks
from everbeat.store.target import Target
from tests.invariants import breaches
from tests.store.conftest import StoreHarness

HANDLER: Final = {"name": "alert", "parameter": "failure", "queue": "alerts", "priority": 7, "flags": '{"careful": true}'}  # fmt: skip
POLICY: Final = json.dumps({"max_retries": 1, "intervals": [1], "retry_for": ["AGAIN"], "on_failure": HANDLER}).encode()  # fmt: skip
LONG: Final = "".join(uuid4().hex for _ in range(300))
ERROR: Final = b'{"code": "BROKEN", "message": "it is broken"}'


def policy(**changes: Any) -> bytes:
    return json.dumps({"on_failure": HANDLER | changes}).encode()


def fail(db: StoreHarness, **options: Any) -> UUID:
    """Send a task and let it fail; return its id."""
    claimed = db.running(**({"policy": POLICY} | options))
    assert db.settle(claimed, "FAILED", error=ERROR) == "FAILED"
    return claimed.id


def handlers(db: StoreHarness, columns: str = "args #>> '{failure,task_id}'") -> list[Any]:
    """Return columns of the tasks that were sent for failures, oldest first."""
    found = db.connection.execute(
        sql.SQL("select {} from {}.tasks where name = 'alert' order by id").format(
            sql.SQL(columns),  # type: ignore[arg-type]
            sql.Identifier(db.target.schema),
        )
    ).fetchall()
    return [row[0] if len(row) == 1 else row for row in found]


def test_a_final_failure_sends_the_handler_with_its_options_and_the_failure(db: StoreHarness) -> None:  # K12
    failed = fail(db, args=b'{"n": 1}', key="k", queue="work")
    columns = "state, queue, priority, policy, flags, attempt, key, parent_id, args"
    ((*rest, args),) = handlers(db, columns)
    assert rest == ["PENDING", "alerts", 7, {}, {"careful": True}, 0, None, None]
    failed_at = db.row(failed, "to_json(failed_at) #>> '{}'")
    assert args == {
        "failure": {
            "task_id": str(failed), "name": "work", "queue": "work", "state": "FAILED", "error": json.loads(ERROR), "attempt": 1,
            "fence": 1, "failed_at": failed_at, "key": "k", "labels": None, "workflow_id": None, "node": None,
            "arguments": {"n": 1}, "arguments_omitted": False, "data_omitted": False,
        }
    }  # fmt: skip
    expected = sql.SQL("select {0}.handler_id(id, fence, failed_at) from {0}.tasks where id = %s").format(
        sql.Identifier(db.target.schema)
    )
    assert db.connection.execute(expected, [failed]).fetchone() == (handlers(db, "id")[0],)


def test_only_final_failures_send_a_handler(db: StoreHarness) -> None:  # K12
    assert db.complete(db.running(policy=POLICY))
    retried = db.running(policy=POLICY)
    db.settle(retried, "FAILED", error=b'{"code": "AGAIN"}', retry_in_ms=60_000)
    db.settle(db.running(policy=POLICY), "CANCELLED", error=b'{"code": "TASK_CANCELLED"}')
    assert db.cancel(db.send(policy=POLICY)) == "CANCELLED"
    (claimed,) = db.claim() if db.send(policy=POLICY) else ()
    db.settle(db.running(), "FAILED", error=ERROR)
    db.settle(db.running(policy=b'{"retry_for": ["\\"on_failure\\""]}'), "FAILED", error=ERROR)
    assert db.row(claimed.id, "state") == "CLAIMED"
    assert db.row(retried.id, "state") == "PENDING"
    assert handlers(db) == []


def test_a_recovery_that_fails_a_task_sends_its_handler(db: StoreHarness) -> None:  # K12
    running = db.running(policy=POLICY)
    (lease,) = [each for each in db.leases() if each.id == running.id]
    db.recover(lease, "fail")
    assert handlers(db, "args #>> '{failure,error,code}'") == ["WORKER_CRASHED"]
    db.recover(lease, "fail")
    assert handlers(db) == [str(running.id)]


def test_each_task_of_an_expired_batch_sends_its_handler(db: StoreHarness) -> None:  # K12
    sent = [db.send(policy=POLICY) for _ in range(50)]
    db.connection.execute(db.plain("update {schema}.tasks set good_until = now() - interval '1 second'"))
    assert len(db.run(expiry.expire(channel=db.target.channel))) == 50
    facts = handlers(db, "args #>> '{failure,task_id}', args #>> '{failure,state}'")
    assert sorted(facts) == sorted((str(task_id), "EXPIRED") for task_id in sent)


def test_a_repeated_settle_sends_no_second_handler(db: StoreHarness) -> None:  # K12
    claimed = db.running(policy=POLICY)
    assert db.settle(claimed, "FAILED", error=ERROR) == "FAILED"
    assert db.settle(claimed, "FAILED", error=ERROR) == "already"
    assert handlers(db) == [str(claimed.id)]


def test_a_failure_that_is_written_again_sends_no_second_handler(db: StoreHarness) -> None:
    failed = fail(db)
    text = "update {schema}.tasks set state = state, fence = fence + 1, failed_at = failed_at + interval '1 hour'"
    db.connection.execute(db.plain(text))
    assert handlers(db) == [str(failed)]


def test_the_failures_of_one_millisecond_have_handlers_with_different_ids(db: StoreHarness) -> None:
    one, other = uuid4(), uuid4()
    text = db.plain("select {schema}.handler_id(%s, %s, '2026-11-28 12:00:00.1234+00')")
    ids = [
        db.connection.execute(text, [task_id, fence]).fetchone()
        for task_id, fence in ((one, 1), (one, 2), (other, 1))
    ]
    assert len(set(ids)) == 3
    at = datetime(2026, 11, 28, 12, 0, 0, 123_000, tzinfo=UTC)
    assert {row[0].int >> 80 for row in ids if row} == {int(at.timestamp() * 1_000)}
    assert {row[0].version for row in ids if row} == {7}


def test_a_retried_task_that_fails_again_sends_a_second_handler(db: StoreHarness) -> None:  # K12
    failed = fail(db)
    db.run(tasks.retry(failed, channel=db.target.channel, call=uuid4()))
    assert handlers(db) == [str(failed)]
    (claimed,) = db.claim()
    db.start(claimed)
    db.settle(claimed, "FAILED", error=ERROR)
    assert handlers(db) == [str(failed)] * 2
    assert handlers(db, "(args #>> '{failure,fence}')::integer") == [1, 2]


def test_a_handler_that_fails_sends_nothing(db: StoreHarness) -> None:  # K12
    fail(db)
    (handler,) = db.claim(names=["alert"])
    db.start(handler)
    assert db.settle(handler, "FAILED", error=ERROR) == "FAILED"
    assert handlers(db, "state") == ["FAILED"]


def test_a_handler_waits_in_its_serial_line_and_for_its_limits(db: StoreHarness) -> None:  # K12
    db.connection.execute(
        db.plain("insert into {schema}.limits (name, concurrency) values ('mail', 2), ('each', 1)")
    )
    fail(db, policy=policy(serial="task:alert"))
    fail(db, policy=policy(serial="task:alert"))
    fail(
        db,
        policy=policy(gates=[{"gate": "mail"}, {"limit": "each", "path": ["failure", "name"]}], costs=[2, 1]),
    )
    assert handlers(db, "serial is not null, gates, costs") == [
        (True, None, None), (True, None, None), (True, ["mail", "each/work"], [2, 1]),
    ]  # fmt: skip
    assert handlers(db, "serial = 'task:alert', serial_at is not null")[:2] == [(True, True)] * 2
    assert len(db.claim(names=["alert"])) == 1
    assert sorted(db.table("lines", "state, gates"), key=str) == [("I", None), ("R", ["mail", "each/work"])]


def test_large_arguments_are_left_out(db: StoreHarness) -> None:
    fail(db, args=json.dumps({"text": "x" * 100_001}).encode())
    assert handlers(db, "args #> '{failure,arguments}' #>> '{}', args #>> '{failure,arguments_omitted}'") == [
        (None, "true")
    ]


def test_the_data_of_a_large_error_is_left_out(db: StoreHarness) -> None:
    large = {"code": "BROKEN", "message": "m", "type": "T", "traceback": "t"}
    claimed = db.running(policy=POLICY)
    db.settle(claimed, "FAILED", error=json.dumps(large | {"data": "x" * 100_000}).encode())
    assert handlers(db, "args #> '{failure,error}', args #>> '{failure,data_omitted}'") == [(large, "true")]


@pytest.mark.parametrize(
    "broken",
    [
        {"name": None}, {"name": LONG}, {"parameter": None}, {"queue": None}, {"priority": "high"}, {"priority": 10**9},
        {"policy": "{"}, {"flags": "]"}, {"gates": 7}, {"gates": [7]}, {"costs": ["many"]}, {"name": "\0"},
    ],
)  # fmt: skip
def test_a_broken_handler_prevents_no_failure_and_is_reported(
    db: StoreHarness, broken: dict[str, Any]
) -> None:
    failed = fail(db, policy=policy(**broken))
    assert db.row(failed, "state") == "FAILED"
    assert db.run(diagnosis.unsent_handlers(within_s=60, most=10)) == [failed]
    assert len(db.table("tasks", "id")) == 1
    db.connection.execute(
        db.plain("update {schema}.tasks set policy = null")
    )  # the invariants demand a handler


@pytest.mark.parametrize("value", ["7", "null", "[]", '"alert"'])
def test_a_handler_that_is_not_an_object_is_ignored(db: StoreHarness, value: str) -> None:
    failed = fail(db, policy=f'{{"on_failure": {value}}}'.encode())
    assert db.row(failed, "state") == "FAILED"
    assert handlers(db) == []


def test_sent_handlers_are_not_reported(db: StoreHarness) -> None:
    fail(db)
    db.settle(db.running(), "FAILED", error=ERROR)
    assert db.run(diagnosis.unsent_handlers(within_s=60, most=10)) == []


def test_an_error_that_a_repetition_can_avoid_aborts_the_failure(db: StoreHarness) -> None:  # K12
    """A handler that is left out because of a deadlock would never be sent."""
    claimed = db.running(policy=POLICY)
    for text in (
        """create function {schema}.collide() returns trigger language plpgsql as
           $$ begin raise sqlstate '40P01'; end $$""",
        "create trigger collide before insert on {schema}.tasks for each row execute function {schema}.collide()",
    ):
        db.connection.execute(db.plain(text))
    with pytest.raises(EverbeatError):
        db.settle(claimed, "FAILED", error=ERROR)
    db.connection.execute(db.plain("drop trigger collide on {schema}.tasks"))
    assert db.row(claimed.id, "state") == "RUNNING"
    assert db.settle(claimed, "FAILED", error=ERROR) == "FAILED"
    assert handlers(db) == [str(claimed.id)]


def test_the_workers_are_notified_of_a_handler(db: StoreHarness) -> None:
    db.connection.execute(db.plain("update {schema}.workers set listens = true"))
    claimed = db.running(policy=POLICY)
    with psycopg.connect(db.target.url, autocommit=True) as listener:
        listener.execute(sql.SQL("listen {}").format(sql.Identifier(db.target.channel)))
        db.settle(claimed, "FAILED", error=ERROR)
        heard = {each.payload for each in listener.notifies(timeout=20, stop_after=2)}
    assert "t:alerts" in heard


def test_the_trigger_knows_the_channel_of_the_schema(db: StoreHarness) -> None:
    assert Target.parse(db.target.url, schema=db.target.schema).channel == f"everbeat_{db.target.schema}"


def test_a_nul_in_the_arguments_does_not_keep_a_handler_with_a_keyed_limit_from_being_sent(
    db: StoreHarness,
) -> None:
    """A NUL is legal in JSON, but PostgreSQL cannot take any text out of such JSON. So the key of the limit is computed without it."""
    limited = policy(gates=[{"limit": "names", "path": ["failure", "name"]}], costs=[1])
    failed = fail(db, policy=limited, args=b'{"n": "a\\u0000"}')
    assert handlers(db, "gates") == [["names/work"]]
    assert handlers(db, "args::text like '%%a\\\\u0000%%'") == [True]
    assert db.row(failed, "state") == "FAILED"


@pytest.mark.parametrize(
    ("value", "key"), [(r"x\u0000y", "xy"), (r"x\\u0000y", r"x\u0000y"), (r"\u0000\u0000\\\u0000z", "\\z")]
)
def test_the_key_of_a_limit_is_its_argument_without_nul(db: StoreHarness, value: str, key: str) -> None:
    query = db.plain("select {schema}.gates_of(%s::json, %s::json)")
    given = ['[{"limit": "n", "path": ["a"]}]', f'{{"a": "{value}", "b": "\\u0000"}}']
    assert db.connection.execute(query, given).fetchone() == ([f"n/{key}"],)


@pytest.mark.parametrize("state", ["FAILED", "EXPIRED"])
def test_the_invariant_notices_a_missing_and_a_second_handler(db: StoreHarness, state: str) -> None:  # I35
    def numbers() -> set[str]:
        return {breach.number for breach in breaches(db.connection, db.target.schema)}

    db.connection.execute(db.plain("alter table {schema}.tasks disable trigger tasks_failure_handled"))
    if state == "FAILED":
        fail(db)
    else:
        db.send(policy=POLICY)
        db.connection.execute(db.plain("update {schema}.tasks set good_until = now() - interval '1 second'"))
        assert len(db.run(expiry.expire(channel=db.target.channel))) == 1
    assert numbers() == {"I35"}
    db.connection.execute(db.plain("alter table {schema}.tasks enable trigger tasks_failure_handled"))
    handled = fail(db)
    assert numbers() == {"I35"}
    db.connection.execute(
        db.plain("delete from {schema}.tasks where name <> 'alert' and id <> %s"), [handled]
    )
    assert numbers() == set()
    copy = """insert into {schema}.tasks (id, name, queue, args, sent_at, enqueued_at)
              select gen_random_uuid(), name, queue, args, sent_at, enqueued_at from {schema}.tasks where name = 'alert'"""
    db.connection.execute(db.plain(copy))
    assert numbers() == {"I35"}
    db.connection.execute(db.plain("delete from {schema}.tasks where name = 'alert' and policy is null"))
