"""Mutants of the statements of bulk actions: each guard of "exactly once" is removed once, and the test of its promise must fail."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import pytest

from everbeat import App
from tests.maintenance import test_bulk as acts
from tests.maintenance.acting import app_of
from tests.store.conftest import StoreHarness
from tests.store.test_mutants import Mutant, notices, scenario

__all__ = ["scenario"]


def with_app(check: Callable[[App, StoreHarness], None]) -> Callable[[StoreHarness], None]:
    def run(db: StoreHarness) -> None:
        with closing(app_of(db)) as app:
            check(app, db)

    return run


def ends_again(app: App, db: StoreHarness) -> None:
    ended = "statement_timestamp() - interval '2 hours'"
    acts.test_a_task_that_ends_again_after_its_retry_is_not_retried_again(app, db, ended)


MUTANTS = [
    Mutant(
        "a portion that two supervisors carry out at once", "bulk/take_action", "for no key update skip locked", "",
        with_app(acts.test_two_supervisors_that_compete_carry_out_each_portion_once),
    ),
    Mutant(
        "an action that retries a task twice", "bulk/retry_tasks", " or h.retry_call is not distinct from %(call)s", "", with_app(ends_again),
    ),
    Mutant(
        "an action on tasks that failed after its request", "bulk/find_ended_tasks",
        "greatest(t.completed_at, t.failed_at, t.cancelled_at, t.expired_at) <= %(requested_at)s", "%(requested_at)s::timestamptz is not null",
        with_app(acts.test_a_task_that_fails_after_the_request_is_not_retried),
    ),
    Mutant(
        "an action on tasks that were sent after its request", "bulk/find_live_tasks", "t.sent_at <= %(requested_at)s",
        "%(requested_at)s::timestamptz is not null",
        with_app(acts.test_a_bulk_cancel_ends_waiting_tasks_and_stops_running_ones_with_their_children),
    ),
    Mutant(
        "an action on tasks that do not match", "bulk/find_ended_tasks", " is true as is_match", " is not null as is_match",
        with_app(acts.test_a_bulk_retry_retries_each_matching_task_once_and_notes_its_start_and_end),
    ),
    Mutant(
        "a portion that is acted on and not counted", "bulk/record_portion", "done = %(done)s", "done = least(b.done, %(done)s)",
        with_app(lambda app, db: acts.test_a_lost_portion_is_neither_left_out_nor_repeated(app, db, "after the commit")),
    ),
    Mutant(
        "an end without its row in the audit log", "bulk/record_portion",
        "from recorded r where r.ended_at is not null", "from recorded r where false",
        with_app(acts.test_a_bulk_retry_retries_each_matching_task_once_and_notes_its_start_and_end),
    ),
    Mutant(
        "a request without its row in the audit log", "bulk/request_action",
        "%(note)s::text from requested r", "%(note)s::text from requested r where false",
        with_app(acts.test_a_bulk_retry_retries_each_matching_task_once_and_notes_its_start_and_end),
    ),
    Mutant(
        "a second task with a key that is retried", "bulk/retry_tasks", "where not f.is_second", "where f.is_second is not null",
        with_app(acts.test_of_several_tasks_with_one_key_only_one_is_retried),
    ),
    Mutant(
        "a recent task that is deleted", "fragment/refusal_of_ended", "then 'RECENT'", "then null",
        with_app(acts.test_single_tasks_are_changed_or_refused_with_the_reason),
    ),
    Mutant(
        "a cancel that forgets the children", "bulk/cancel_tasks", "h.state = 'RUNNING' or h.attempt > 0 and (", "false and (",
        with_app(acts.test_a_bulk_cancel_ends_waiting_tasks_and_stops_running_ones_with_their_children),
    ),
    Mutant(
        "an action with an unknown filter", "bulk/take_action", "where k.name <> all(%(filters)s::text[])", "where k.name = any(%(filters)s::text[])",
        with_app(acts.test_an_action_with_a_filter_that_this_version_does_not_know_is_left_to_newer_code),
    ),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.why)
def test_a_mutant_of_a_bulk_action_fails_its_test(
    mutant: Mutant, scenario: Callable[[Mutant | None], StoreHarness]
) -> None:
    assert not notices(mutant, scenario(None)), "the unchanged protocol passes its own test"
    assert notices(mutant, scenario(mutant)), f"no test failed: {mutant.why}"
