"""Each guard of what moves workflows on is taken out once, and the test of its promise must go red."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.services import test_broken_workflows as broken
from tests.store import test_advance as advance
from tests.store import test_begun_nodes as begun
from tests.store import test_workflow_control as control
from tests.store import test_workflow_retries as retries
from tests.store.conftest import Hands
from tests.store.test_mutants import Mutant, notices, stage

__all__ = ["stage"]


def joins(join: str | int, *bad: str, expected: str) -> Callable[[Hands], None]:
    return lambda hands: advance.test_joins(hands, join, bad, expected)


def missing(damage: str, code: str) -> Callable[[Hands], None]:
    return lambda hands: control.test_what_is_missing_is_said_and_nothing_hangs(hands, damage, code)


def stuck() -> Iterator[Mutant]:
    """The reconciler without one of the things it looks for."""
    parts: list[tuple[str, str, str, Callable[[Hands], None]]] = [
        ("TASK_ENDED", "where t.id is null or t.state in", "where t.state || '?' in",
         control.test_a_task_that_ended_and_nothing_was_told),
        ("CHILD_ENDED", "where w.id is null or w.state in", "where w.state || '?' in",
         control.test_a_child_that_ended_and_its_parent_was_not_told),
        ("NOT_ENQUEUED", "where s.state = 'RUNNING'\n    union all", "where false\n    union all",
         control.test_a_node_that_is_ready_and_nobody_enqueued),
        ("NOT_RESOLVED", "n.state = 'PENDING'\n", "false\n", control.test_edges_of_an_ended_node_that_nobody_closed),
        ("NOT_CANCELLED", "where s.state = 'CANCELLING' and (", "where false and (", control.test_a_cancel_that_nobody_acted_on_is_put_right),
        ("NODE_GONE", "and p.number is null\n", "and false\n", control.test_a_node_whose_row_was_deleted_fails_and_what_waits_for_it_is_resolved),
        ("NOTHING_MOVES", "where s.state = 'RUNNING'\n      and exists", "where false\n      and exists",
         control.test_nodes_that_wait_for_each_other_are_reported_and_not_said_to_be_put_right),
        ("NOT_FINISHED", "where s.state <> 'PAUSED' and", "where false and", control.test_nothing_left_and_not_finished),
    ]  # fmt: skip
    for what, old, new, check in parts:
        yield Mutant(f"a reconciler blind to {what}", "workflow/stuck", old, new, check)
    yield Mutant(
        "a reconciler that takes what moves for stuck", "workflow/stuck", "o.at > statement_timestamp()", "o.at > 'infinity'::timestamptz",
        control.test_what_is_moving_is_left_alone,
    )  # fmt: skip


MUTANTS = [
    Mutant(
        "two that advance one workflow", "workflow/lock", "for no key update skip locked", "",
        advance.test_who_is_at_a_workflow_is_alone_there,
    ),
    Mutant(
        "an end that nobody is told of", "schema/0004_workflows/14_tasks_ended", "new.workflow_id is not null and", "false and",
        advance.test_a_chain_hands_results_on,
    ),
    Mutant(
        "a start that two may make with one key", "schema/0004_workflows/02_workflows_key", "create unique index", "create index",
        advance.test_two_with_one_key_are_one_while_it_lives,
    ),
    Mutant(
        "a node enqueued once more", "workflow/enqueue", "and n.state || '' in ('PENDING', 'READY')", "",
        advance.test_what_is_enqueued_twice_is_sent_once,
    ),
    Mutant(
        "a task whose id says nothing", "workflow/enqueue", "on conflict (id) do nothing", "",
        advance.test_a_task_that_was_sent_before_its_node_knew_is_not_sent_again,
    ),
    Mutant(
        "a failure that meets an edge", "workflow/absorb", "when (c.state = 'COMPLETED' or e.tolerates)", "when (true or e.tolerates)",
        joins("all", "p1", expected="SKIPPED"),
    ),
    Mutant(
        "an outcome that nobody gets", "workflow/absorb", "when (c.state = 'COMPLETED' or e.tolerates)", "when (c.state = 'COMPLETED')",
        advance.test_whoever_asks_for_the_outcome_gets_the_error,
    ),
    Mutant(
        "a condition that always holds", "workflow/absorb", "(e.expects is null or", "(true or",
        lambda hands: advance.test_conditions(hands, False, "SKIPPED", "COMPLETED"),
    ),
    Mutant(
        "a result that is missing and not missed", "workflow/absorb", "when t.state = 'COMPLETED' and t.result is null then 'FAILED'",
        "when t.state = 'COMPLETED' and t.result is null then 'COMPLETED'",
        missing("update {schema}.tasks set result = null", "RESULT_NOT_AVAILABLE"),
    ),
    Mutant(
        "a task that is gone and waited for", "workflow/absorb", "when n.kind = 'task' and t.id is null then 'FAILED'", "",
        missing("delete from {schema}.tasks", "RESULT_NOT_AVAILABLE"),
    ),
    Mutant(
        "a node that begins before its parents have ended", "workflow/resolve", "where not j.fails and not j.waits and", "where not j.fails and",
        advance.test_a_node_waits_for_all_of_its_parents,
    ),
    Mutant(
        "a node that begins without its quorum", "workflow/resolve", "and (j.quorum is null or j.met >= j.quorum)", "",
        advance.test_a_quorum_is_waited_for,
    ),
    Mutant(
        "a quorum waited for in vain", "workflow/resolve", "(j.fails or j.met + j.open < j.quorum)", "j.fails",
        joins(2, "p0", "p2", expected="SKIPPED"),
    ),
    Mutant(
        "a skip that nobody hears of", "workflow/resolve", "select s.workflow_id, s.number from skipped s",
        "select s.workflow_id, s.number from skipped s where false",
        joins("all", "p1", expected="SKIPPED"),
    ),
    Mutant(
        "a map that ends before its members", "workflow/resolve", "where c.state = 'ENQUEUED' and not exists (",
        "where c.state = 'ENQUEUED' and true or not exists (",
        advance.test_a_map_is_the_list_of_its_members,
    ),
    Mutant(
        "a cancel that waits for the row of a child", "workflow/withdraw", "for no key update of w skip locked", "for no key update of w",
        lambda hands: control.test_two_that_withdraw_each_others_children_do_not_block_each_other(hands, "cancel"),
    ),
    Mutant(
        "a resume that waits for the row of a child", "workflow/let_go", "for no key update of w skip locked", "for no key update of w",
        lambda hands: control.test_two_that_withdraw_each_others_children_do_not_block_each_other(hands, "resume"),
    ),
    Mutant(
        "a child that another holds and that is not looked at again", "workflow/withdraw", "select w.workflow_id, null::integer from waits w",
        "select w.workflow_id, null::integer from waits w where false",
        control.test_a_step_that_waits_for_a_child_that_another_holds_is_not_repeated_at_once,
    ),
    Mutant(
        "a map that does not miss a member", "workflow/resolve", ") < c.members then 'FAILED'", ") < 0 then 'FAILED'",
        control.test_a_map_with_a_member_whose_row_was_deleted_does_not_complete,
    ),
    Mutant(
        "members of a map over a result behind all other nodes", "workflow/ended",
        "order by coalesce(n.member_of, n.number), n.kind = 'map', n.number limit 1",
        "order by n.number limit 1", advance.test_the_first_failed_node_is_first_in_the_order_of_adding,
    ),
    Mutant(
        "a retry that leaves edges as they were", "workflow/retry", "and e.parent = a.number and e.state <> 'OPEN'", "and false",
        retries.test_a_retry_runs_consumers_of_an_outcome_again,
    ),
    Mutant(
        "a retry that does not open edges to what still waits", "workflow/retry", "and c.state || '' = 'PENDING'", "and false",
        retries.test_what_still_waits_hears_of_the_second_run_only,
    ),
    Mutant(
        "a retry that keeps the members of a map over the old list", "workflow/retry", "where a.is_emptied and m.", "where false and m.",
        retries.test_a_map_is_made_anew_when_its_list_is_and_keeps_its_members_otherwise,
    ),
    Mutant(
        "a completed node that goes on from its old steps", "workflow/enqueue", "where not b.is_whole and", "where true and",
        retries.test_a_completed_node_begins_without_its_steps_and_one_that_failed_keeps_them,
    ),
    Mutant(
        "a retry that is done twice", "workflow/retry_hold", "w.retry_call is not distinct from %(call)s::uuid as is_done", "false as is_done",
        control.test_a_repeated_retry_does_not_run_again_what_it_has_run,
    ),
    Mutant(
        "a pause that lets what is claimed begin", "workflow/withdraw", "where t.id = h.id and h.state in ('PENDING', 'CLAIMED')",
        "where t.id = h.id and h.state = 'PENDING'", control.test_a_claimed_task_of_a_paused_workflow_does_not_begin,
    ),
    Mutant(
        "a pause that makes steps be done again", "workflow/withdraw",
        "or not exists (select from {schema}.steps s where s.task_id = t.id)", "or true",
        begun.test_a_pause_takes_back_no_task_that_has_recorded_a_step,
    ),
    Mutant(
        "a child that goes on while its parent is stopped", "workflow/withdraw", "n.kind = 'workflow' and n.state = 'ENQUEUED' and w.id = n.task_id",
        "false and w.id = n.task_id", control.test_children_pause_resume_and_cancel_with_their_parent,
    ),
    Mutant(
        "a cancel that asks nobody", "workflow/withdraw", "where t.id = h.id and h.state = 'RUNNING' and h.doing = 'CANCELLING'",
        "where t.id = h.id and h.state = 'NONE' and h.doing = 'CANCELLING'", control.test_a_cancel_skips_cancels_and_asks,
    ),
    Mutant(
        "a workflow that ends before its nodes", "workflow/ended", "and not exists (", "and 1 = any (select 1 union ",
        advance.test_a_chain_hands_results_on,
    ),
    Mutant(
        "a parent that is not told", "workflow/finish", "where e.parent_id is not null", "where false",
        advance.test_children_get_input_and_give_their_output,
    ),
    Mutant(
        "a child started twice", "workflow/adopt", "and n.state in ('PENDING', 'READY')", "",
        advance.test_what_is_enqueued_twice_is_sent_once,
    ),
    Mutant(
        "a retry of what completed", "workflow/retry", "n.state in ('FAILED', 'CANCELLED', 'EXPIRED', 'SKIPPED')",
        "n.state in ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED', 'SKIPPED')",
        control.test_a_retry_begins_what_failed_and_keeps_what_completed,
    ),
    Mutant(
        "a retry that overlooks what it did before", "workflow/retry", "set state = 'OPEN'", "set state = e.state",
        control.test_a_retry_begins_what_failed_and_keeps_what_completed,
    ),
    Mutant(
        "a retry that pays once more", "workflow/enqueue", "where m.iteration > 1", "where false",
        begun.test_a_retry_of_a_workflow_does_no_recorded_step_again,
    ),
    Mutant(
        "a map whose last member has no number", "workflow/resolve", "n.first_member::bigint + n.members", "n.first_member + n.members",
        broken.test_a_map_whose_members_have_no_last_number_takes_its_step,
    ),
    *stuck(),
]  # fmt: skip


@pytest.mark.parametrize(
    "mutant",
    [
        mutant if number % 4 == 0 else pytest.param(mutant, marks=pytest.mark.long)
        for number, mutant in enumerate(MUTANTS)
    ],
    ids=lambda mutant: mutant.why,
)
def test_a_missing_guard_is_noticed(mutant: Mutant, stage: Callable[[Mutant | None], Hands]) -> None:
    assert not notices(mutant, stage(None)), "the protocol as it is passes its own test"
    assert notices(mutant, stage(mutant)), f"nobody noticed: {mutant.why}"
