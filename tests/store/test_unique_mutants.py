"""Mutants of the statements and triggers of unique tasks: each rule is broken once, and the test of its promise must fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from everbeat import App
from tests.client import test_unique as promised
from tests.store import test_unique_tasks as stored
from tests.store.conftest import StoreHarness
from tests.store.test_mutants import Mutant, notices, scenario

__all__ = ["scenario"]

SEND = "task/insert_unique_tasks"
SCHEMA = "schema/0014_limits"
CLEAR, MOVE = f"{SCHEMA}/53_clear_key", f"{SCHEMA}/56_move_key"
RETAKEN = "or old.state = 'CLAIMED' or new.attempt < old.attempt"


def by_app(test: Callable[..., None], *arguments: Any) -> Callable[[StoreHarness], None]:
    """Return the test of a client as the test of a store: its app sends to the schema of the mutant."""

    def check(db: StoreHarness) -> None:
        app = App(db.target.url, schema=db.target.schema, patience="5s")

        @app.task
        async def work(n: int = 0) -> int:
            return n

        try:
            test(db, work, *arguments)
        finally:
            app.close()

    return check


MUTANTS = [
    Mutant(
        "a send that takes the key of a live task", CLEAR, "and u.until <= statement_timestamp()", "",
        by_app(promised.test_a_key_of_a_waiting_task_is_taken_in_every_scope, "kept", "existing"),
    ),
    Mutant(
        "a key that is never free", CLEAR, "and u.until <= statement_timestamp()", "and u.until < '-infinity'",
        by_app(promised.test_a_key_of_a_dead_holder_is_freed_by_the_recovery_that_ends_the_task, "1h"),
    ),
    Mutant(
        "a send that takes the key of its own ended task again", CLEAR, " and u.task_id <> new.task_id", "",
        stored.test_a_send_that_runs_twice_at_once_does_not_take_the_key_of_its_own_ended_task,
    ),
    Mutant(
        "a waiting key that a clock set back takes again", MOVE, "'-infinity' end::timestamptz", "statement_timestamp() end",
        by_app(promised.test_a_waiting_key_that_was_freed_stays_free_if_the_clock_is_set_back),
    ),
    Mutant(
        "a waiting key that no claim frees", MOVE, "then '-infinity' end", "then null end",
        stored.test_a_repeated_send_of_a_task_that_has_ended_returns_that_task,
    ),
    Mutant(
        "a released task without its waiting key", MOVE, RETAKEN, "or new.attempt < old.attempt",
        by_app(promised.test_a_claimed_task_that_is_released_takes_its_waiting_key_back),
    ),
    Mutant(
        "a declined task without its waiting key", MOVE, RETAKEN, "or old.state = 'CLAIMED'",
        by_app(promised.test_a_claimed_task_that_is_released_takes_its_waiting_key_back),
    ),
    Mutant(
        "a waiting key that a retry takes again", MOVE, RETAKEN, "or true",
        by_app(promised.test_a_key_of_a_dead_holder_stays_taken_while_the_task_will_run_again, "waiting"),
    ),
    Mutant(
        "an ended task that frees the key of a newer task", MOVE,
        "where own.name = new.name and own.key = new.unique_key and own.task_id = new.id\n              for no key",
        "where own.name = new.name and own.key = new.unique_key\n              for no key",
        by_app(promised.test_a_task_that_ends_leaves_the_waiting_key_to_a_newer_task),
    ),
    Mutant(
        "a release that waits for a sender", MOVE, "for no key update skip locked", "for no key update",
        stored.test_a_release_does_not_wait_for_an_open_transaction_that_takes_the_key,
    ),
    Mutant(
        "a period that ends together with the task", MOVE, "then statement_timestamp() + new.unique_for::interval", "then '-infinity'",
        by_app(promised.test_each_end_of_a_task_frees_its_key_as_its_scope_demands, "1h", "FAILED"),
    ),
    Mutant(
        "a period that never ends", f"{SCHEMA}/57_tasks_key_moved", "new.unique_for <> 'kept'", "new.unique_for = 'waiting'",
        by_app(promised.test_a_key_of_a_dead_holder_is_freed_by_the_recovery_that_ends_the_task, "1h"),
    ),
    Mutant(
        "a retry by older code beside another task with the key", MOVE, "if not found then", "if false then",
        by_app(promised.test_a_retry_by_older_code_is_refused_while_another_task_has_the_key),
    ),
    Mutant(
        "an operator's retry that does not take the key", MOVE, "set until = null where u.task_id", "set until = u.until where u.task_id",
        by_app(promised.test_an_operators_retry_takes_the_key_again_unless_another_task_has_it, "waiting"),
    ),
    Mutant(
        "a key that outlives its task", f"{SCHEMA}/59_tasks_key_dropped", "when (old.unique_key is not null)", "when (false)",
        by_app(promised.test_retention_frees_a_kept_key_together_with_the_record),
    ),
    Mutant(
        "a task without the key that it asked for", SEND, "(a.unique_for is null or exists (select from taken k where k.task_id = a.id))", "true",
        by_app(promised.test_a_key_of_a_waiting_task_is_taken_in_every_scope, "waiting", "existing"),
    ),
    Mutant(
        "a repeated send that does not find what it changed", SEND, "on t.last_send = a.id", "on false",
        stored.test_a_repeated_send_that_changed_a_task_returns_it_after_its_end,
    ),
    Mutant(
        "a repeated send that does not find its own task", SEND, "join {schema}.tasks t on t.id = a.id\n", "join {schema}.tasks t on false\n",
        stored.test_a_repeated_send_of_a_task_that_has_ended_returns_that_task,
    ),
    Mutant(
        "a send that replaces a task whose code has started", SEND, "and w.attempt = 0", "",
        by_app(promised.test_a_task_whose_code_has_started_is_not_replaced_while_it_waits_for_its_retry),
    ),
    Mutant(
        "a send that replaces a running task", SEND, "and t.state = 'PENDING' and not exists", "and not exists",
        by_app(promised.test_a_scope_decides_when_a_key_becomes_free, "1h", "replace", ["waiting", "claimed", "running", "ended"]),
    ),
    Mutant(
        "a send that replaces a task without a lock", SEND, "    order by h.name, h.key\n    for no key update of t\n", "",
        stored.test_a_send_that_meets_a_claim_in_flight_sends_a_new_task,
    ),
    Mutant(
        "a rejected send_many that stores a part", SEND, "where b.asked = a.id) and not exists (select from rejected)\n",
        "where b.asked = a.id)\n",
        by_app(promised.test_send_many_stores_nothing_if_one_call_is_rejected),
    ),
    Mutant(
        "a send_many that stores a part if a rejected key is taken in the meantime", SEND, "then {schema}.refuse_key(a.name, a.key) end",
        "then 0 end",
        stored.test_a_reject_among_other_calls_stores_nothing_if_its_key_is_taken_in_the_meantime,
    ),
    Mutant(
        "a debounce beyond at_latest", SEND, "t.sent_at + a.at_latest_ms * interval '1 millisecond'", "null",
        by_app(promised.test_a_debounce_moves_the_due_time_and_not_beyond_at_latest),
    ),
    Mutant(
        "a replaced task that loses its place", SEND, "case when m.is_new and not a.has_moment then t.enqueued_at end", "null::timestamptz",
        by_app(promised.test_a_replaced_task_gets_the_new_arguments_and_options_and_keeps_its_place),
    ),
    Mutant(
        "a replaced task with its old mark", SEND,
        "needs = case when not m.is_new then t.needs end, needs_id = case when not m.is_new then t.needs_id end,", "",
        by_app(promised.test_a_replaced_task_loses_the_mark_of_its_old_arguments),
    ),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.why)
def test_a_mutant_of_unique_tasks_fails_its_test(
    mutant: Mutant, scenario: Callable[[Mutant | None], StoreHarness]
) -> None:  # K8
    assert not notices(mutant, scenario(None)), "the unchanged protocol passes its own test"
    assert notices(mutant, scenario(mutant)), f"no test failed: {mutant.why}"
