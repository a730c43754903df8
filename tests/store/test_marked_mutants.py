"""Mutants of declines and of claims of marked tasks: each rule is broken once, and the test of its promise must fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.store import test_marked_tasks as marked
from tests.store.conftest import StoreHarness
from tests.store.test_mutants import Mutant, notices, scenario

__all__ = ["scenario"]

IN_LANE = "t.serial is null and t.needs_id is null and t.queue = r.queue"
SUSPECT = "(not {schema}.is_marked(t.needs) or t.needs_id = any(array(select m.needs_id from"
OWN_POLICY = "case when t.state = 'RUNNING' and t.attempt = 1 and t.policy ->> 'is_default' = 'true' then null else t.policy end"

MUTANTS = [
    Mutant(
        "an unfenced decline", "task/decline_tasks", "where t.claim_id = a.claim_id and t.state", "where t.state",
        marked.test_only_the_holder_can_decline_and_a_repeated_decline_changes_nothing,
    ),
    Mutant(
        "a decline that counts as an attempt", "task/decline_tasks", "attempt = t.attempt - (t.state = 'RUNNING')::integer,", "",
        marked.test_a_declined_task_keeps_its_place_and_gets_a_mark_at_no_cost,
    ),
    Mutant(
        "a decline that lowers the attempt number of a task that never started", "task/decline_tasks",
        "t.attempt - (t.state = 'RUNNING')::integer", "t.attempt - 1",
        marked.test_a_claimed_task_is_declined_like_a_started_one,
    ),
    Mutant(
        "a decline that loses the place of the task", "task/decline_tasks", "started_at = null, alone",
        "started_at = null, enqueued_at = now(), alone",
        marked.test_a_declined_task_keeps_its_place_and_gets_a_mark_at_no_cost,
    ),
    Mutant(
        "a decline that keeps the policy of the worker", "task/decline_tasks", OWN_POLICY, "t.policy",
        marked.test_a_decline_keeps_the_policy_of_the_sender_and_removes_that_of_the_worker,
    ),
    Mutant(
        "a decline that loses the policy of the sender", "task/decline_tasks", "and t.policy ->> 'is_default' = 'true' ", "",
        marked.test_a_decline_keeps_the_policy_of_the_sender_and_removes_that_of_the_worker,
    ),
    Mutant(
        "a decline that loses the policy of an earlier attempt", "task/decline_tasks", "and t.attempt = 1 ", "",
        marked.test_a_decline_keeps_the_policy_of_an_earlier_attempt,
    ),
    Mutant(
        "a decline that ignores a requested cancel", "task/decline_tasks", "when h.is_cancelled then 'CANCELLED'", "",
        marked.test_a_requested_cancel_cancels_a_declined_task,
    ),
    Mutant(
        "a task that is declined forever", "task/decline_tasks", " or mark.id = h.needs_id", "",
        marked.test_a_task_is_not_declined_twice_for_the_same_names,
    ),
    Mutant(
        "a mark of duplicate argument names", "task/decline_tasks", "n.has_doubles or", "",
        marked.test_a_task_whose_argument_names_do_not_fit_a_mark_stays_with_its_holder,
    ),
    Mutant(
        "a mark of any size", "task/decline_tasks", "or octet_length(n.needs::text) > 4096", "",
        marked.test_a_task_whose_argument_names_do_not_fit_a_mark_stays_with_its_holder,
    ),
    Mutant(
        "marks by the order of the arguments", "task/decline_tasks", "order by k.name collate \"C\"", "order by strpos(h.args::text, k.name)",
        marked.test_tasks_with_the_same_name_and_argument_names_form_one_group,
    ),
    Mutant(
        "one mark for all task functions", "task/decline_tasks", "{schema}.mark_of(h.name, n.needs)", "{schema}.mark_of('', n.needs)",
        marked.test_tasks_with_the_same_name_and_argument_names_form_one_group,
    ),
    Mutant(
        "a decline that notifies no worker", "task/decline_tasks", "select 'm' from", "select 'M' from",
        marked.test_a_decline_notifies_workers_of_the_marked_task,
    ),
    Mutant(
        "a claim that takes marked tasks with others", "task/claim_tasks", IN_LANE, "t.serial is null and t.queue = r.queue",
        marked.test_a_claim_takes_a_marked_task_only_if_it_names_its_group,
    ),
    Mutant(
        "a claim of any marked head", "schema/0016_fleets/22_apply_line_changes",
        "else h.needs_id::text end as reader", "else h.name end as reader",
        marked.test_a_marked_head_keeps_its_serial_line_in_order,
    ),
    Mutant(
        "a line that skips its marked head", "schema/0016_fleets/22_apply_line_changes",
        "and h.fence < 9223372036854775807", "and h.needs_id is null and h.fence < 9223372036854775807",
        marked.test_a_marked_head_keeps_its_serial_line_in_order,
    ),
    Mutant(
        "a group of another task function", "task/find_next_due", "    where m.name = any(%(names)s::text[])\n", "",
        marked.test_claims_and_next_due_skip_a_group_without_tasks_of_their_names,
    ),
    Mutant(
        "marked tasks that are claimed out of turn", "task/claim_tasks",
        "select m.queue, m.priority, first.enqueued_at, false, null, null, m.needs_id",
        "select m.queue, m.priority, '-infinity'::timestamptz, false, null, null, m.needs_id",
        marked.test_marked_tasks_are_claimed_in_the_same_order_as_others,
    ),
    Mutant(
        "check_suspects counts marked suspects for every worker", "task/check_suspects",
        SUSPECT, "(true or t.needs_id = any(array(select m.needs_id from",
        marked.test_a_marked_suspect_is_left_to_workers_that_understand_it,
    ),
    Mutant(
        "find_next_due counts marked suspects for every worker", "task/find_next_due",
        SUSPECT, "(true or t.needs_id = any(array(select m.needs_id from",
        marked.test_a_marked_suspect_is_left_to_workers_that_understand_it,
    ),
    Mutant(
        "find_next_due counts a marked head for every worker", "task/find_next_due", "and l.reader = r.reader order by", "order by",
        marked.test_next_due_counts_marked_tasks_only_for_workers_that_understand_them,
    ),
    Mutant(
        "a retry that keeps the mark", "task/retry_task",
        "needs = case when later.is_marked then t.needs end, needs_id = case when later.is_marked then t.needs_id end, ", "",
        marked.test_an_operator_retry_clears_the_mark,
    ),
    Mutant(
        "a listing that ends with its first page", "task/list_marked_tasks",
        "(%(after_id)s::uuid, %(after_queue)s::text, %(after_priority)s::smallint)",
        "(%(after_id)s::uuid, 'zzz' || %(after_queue)s::text, %(after_priority)s::smallint)",
        lambda db: marked.test_the_pages_of_the_listing_name_each_group_once(db, 2),
    ),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.why)
def test_a_mutant_of_the_rules_for_marked_tasks_fails_its_test(
    mutant: Mutant, scenario: Callable[[Mutant | None], StoreHarness]
) -> None:  # J2
    assert not notices(mutant, scenario(None)), "the unchanged protocol passes its own test"
    assert notices(mutant, scenario(mutant)), f"no test failed: {mutant.why}"
