"""Each rule of declines and of the claims of marked tasks is broken once, and the test of its promise must go red."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.store import test_marked_tasks as marked
from tests.store.conftest import Hands
from tests.store.test_mutants import Mutant, notices, stage

__all__ = ["stage"]

IN_LANE = "t.serial is null and t.needs_id is null and t.queue = r.queue"
HEAD = "(first.needs_id is null or first.needs_id = any(array(select m.needs_id from marked m)))"
SUSPECT = "(t.needs_id is null or t.needs_id = any(array(select m.needs_id from"
OWN_POLICY = "case when t.state = 'RUNNING' and t.attempt = 1 and t.policy ->> 'is_default' = 'true' then null else t.policy end"

MUTANTS = [
    Mutant(
        "an unfenced decline", "task/decline", "where t.claim_id = a.claim_id and t.state", "where t.state",
        marked.test_only_the_holder_declines_and_a_repeated_decline_changes_nothing,
    ),
    Mutant(
        "a decline that counts as an attempt", "task/decline", "attempt = t.attempt - (t.state = 'RUNNING')::integer,", "",
        marked.test_a_declined_task_waits_where_it_was_with_a_mark_and_at_no_cost,
    ),
    Mutant(
        "a decline that uncounts what never began", "task/decline", "t.attempt - (t.state = 'RUNNING')::integer", "t.attempt - 1",
        marked.test_a_task_that_was_only_claimed_is_declined_alike,
    ),
    Mutant(
        "a decline that loses its place", "task/decline", "started_at = null, alone", "started_at = null, enqueued_at = now(), alone",
        marked.test_a_declined_task_waits_where_it_was_with_a_mark_and_at_no_cost,
    ),
    Mutant(
        "a decline that keeps the policy of the worker", "task/decline", OWN_POLICY, "t.policy",
        marked.test_a_policy_that_the_sender_gave_is_kept_and_the_workers_own_is_taken_back,
    ),
    Mutant(
        "a decline that loses the policy of the sender", "task/decline", "and t.policy ->> 'is_default' = 'true' ", "",
        marked.test_a_policy_that_the_sender_gave_is_kept_and_the_workers_own_is_taken_back,
    ),
    Mutant(
        "a decline that loses the policy of an earlier attempt", "task/decline", "and t.attempt = 1 ", "",
        marked.test_a_policy_that_an_earlier_attempt_ran_under_is_kept,
    ),
    Mutant(
        "a decline that forgets a cancel", "task/decline", "when h.is_cancelled then 'CANCELLED'", "",
        marked.test_a_cancel_that_was_requested_cancels_a_declined_task,
    ),
    Mutant(
        "a task that is declined for ever", "task/decline", " or mark.id = h.needs_id", "",
        marked.test_a_task_is_not_declined_twice_for_the_same_names,
    ),
    Mutant(
        "a mark of names that occur twice", "task/decline", "n.has_doubles or", "",
        marked.test_names_that_no_mark_can_hold_leave_the_task_to_its_holder,
    ),
    Mutant(
        "a mark of any size", "task/decline", "or octet_length(n.needs::text) > 4096", "",
        marked.test_names_that_no_mark_can_hold_leave_the_task_to_its_holder,
    ),
    Mutant(
        "marks by the order of the arguments", "task/decline", "order by k.name collate \"C\"", "order by random()",
        marked.test_tasks_with_the_same_name_and_argument_names_are_one_group,
    ),
    Mutant(
        "one mark for all task functions", "task/decline", "json_build_array(h.name, n.needs)", "json_build_array(n.needs)",
        marked.test_tasks_with_the_same_name_and_argument_names_are_one_group,
    ),
    Mutant(
        "a decline that no worker hears of", "task/decline", "select 'm' from", "select 'M' from",
        marked.test_a_decline_tells_workers_that_marked_tasks_wait,
    ),
    Mutant(
        "a claim that takes marked tasks with others", "task/claim", IN_LANE, "t.serial is null and t.queue = r.queue",
        marked.test_no_claim_takes_a_marked_task_unless_it_names_its_group,
    ),
    Mutant(
        "a claim of any marked head", "task/claim", "            first.needs_id is null\n", "            true\n",
        marked.test_a_marked_head_keeps_its_serial_line_in_order,
    ),
    Mutant(
        "a line that goes past its marked head", "task/claim",
        "where t.serial = line.serial and t.serial is not null and t.state in ('PENDING', 'CLAIMED', 'RUNNING')\n",
        "where t.serial = line.serial and t.serial is not null and t.state in ('PENDING', 'CLAIMED', 'RUNNING') and t.needs_id is null\n",
        marked.test_a_marked_head_keeps_its_serial_line_in_order,
    ),
    Mutant(
        "a group of another task function", "task/next_due", "    where m.name = any(%(names)s::text[])\n", "",
        marked.test_a_group_without_tasks_of_the_names_asked_for_is_passed_over,
    ),
    Mutant(
        "marked tasks before their turn", "task/claim", "select m.queue, m.priority, first.enqueued_at, null, null, null, m.needs_id",
        "select m.queue, m.priority, '-infinity'::timestamptz, null, null, null, m.needs_id",
        marked.test_marked_tasks_are_served_in_the_same_order_as_others,
    ),
    Mutant(
        "marked suspects for everybody", "task/suspects_wait", SUSPECT, "(true or t.needs_id = any(array(select m.needs_id from",
        marked.test_a_suspect_that_is_marked_is_left_to_whoever_understands_it,
    ),
    Mutant(
        "marked suspects ahead for everybody", "task/next_due", SUSPECT, "(true or t.needs_id = any(array(select m.needs_id from",
        marked.test_a_suspect_that_is_marked_is_left_to_whoever_understands_it,
    ),
    Mutant(
        "a marked head that everybody waits for", "task/next_due", HEAD, "true",
        marked.test_next_due_counts_marked_tasks_only_for_whoever_understands_them,
    ),
    Mutant(
        "a retry that keeps the mark", "task/retry", "needs = null, needs_id = null, ", "",
        marked.test_an_operators_retry_clears_the_mark,
    ),
    Mutant(
        "a listing that ends with its first page", "task/marked", "(%(after_id)s::uuid, %(after_queue)s::text, %(after_priority)s::smallint)",
        "(%(after_id)s::uuid, 'zzz' || %(after_queue)s::text, %(after_priority)s::smallint)",
        lambda hands: marked.test_the_pages_of_the_listing_name_each_group_once(hands, 2),
    ),
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.why)
def test_a_missing_rule_is_noticed(mutant: Mutant, stage: Callable[[Mutant | None], Hands]) -> None:  # J2
    assert not notices(mutant, stage(None)), "the protocol as it is passes its own test"
    assert notices(mutant, stage(mutant)), f"nobody noticed: {mutant.why}"
