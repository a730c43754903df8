"""Mutants of the statements that advance workflows: each guard is removed once, and the test of its promise must fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.maintenance import test_reconciler as broken
from tests.store import test_advance as advance
from tests.store import test_begun_nodes as begun
from tests.store import test_maps_of_workflows as maps_of_workflows
from tests.store import test_started_by_tasks as started
from tests.store import test_workflow_branches as branches
from tests.store import test_workflow_control as control
from tests.store import test_workflow_resilience as resilience
from tests.store import test_workflow_retries as retries
from tests.store.conftest import StoreHarness
from tests.store.test_mutants import Mutant, notices, scenario

__all__ = ["scenario"]


def joins(join: str | int, *bad: str, expected: str) -> Callable[[StoreHarness], None]:
    return lambda db: advance.test_a_join_runs_or_is_skipped_by_its_rule_and_its_failed_parents(
        db, join, bad, expected
    )


def missing(damage: str, code: str) -> Callable[[StoreHarness], None]:
    return lambda db: control.test_a_damaged_task_fails_its_dependants_instead_of_blocking_them(
        db, damage, code
    )


def stuck() -> Iterator[Mutant]:
    """Return mutants of the reconciler, each without one of its checks."""
    parts: list[tuple[str, str, str, Callable[[StoreHarness], None]]] = [
        ("TASK_ENDED", "where t.id is null or t.state in", "where t.state || '?' in",
         control.test_the_reconciler_detects_a_task_that_ended_without_an_event),
        ("CHILD_ENDED", "where w.id is null or w.state in", "where w.state || '?' in",
         control.test_the_reconciler_detects_a_nested_workflow_whose_end_did_not_reach_its_parent),
        ("NOT_ENQUEUED", "where s.state = 'RUNNING'\n    union all", "where false\n    union all",
         control.test_the_reconciler_detects_a_ready_node_that_is_not_enqueued),
        ("NOT_RESOLVED", "n.state = 'PENDING'\n", "false\n", control.test_the_reconciler_detects_open_edges_of_an_ended_node),
        ("NOT_CANCELLED", "where s.state = 'CANCELLING' and (", "where false and (",
        control.test_the_reconciler_completes_a_cancel_that_was_not_carried_out),
        ("NODE_GONE", "and p.number is null\n", "and false\n", control.test_a_node_whose_row_was_deleted_fails_and_its_dependants_are_resolved),
        ("NOTHING_MOVES", "where s.state = 'RUNNING'\n      and exists", "where false\n      and exists",
         control.test_nodes_that_wait_for_each_other_are_reported_as_not_recovered),
        ("NOT_FINISHED", "where s.state <> 'PAUSED' and", "where false and",
        control.test_the_reconciler_detects_a_workflow_without_open_nodes_that_is_not_finished),
    ]  # fmt: skip
    for what, old, new, check in parts:
        yield Mutant(f"a reconciler blind to {what}", "workflow/find_stuck", old, new, check)
    yield Mutant(
        "a reconciler that takes what moves for stuck", "workflow/find_stuck", "o.at > statement_timestamp()", "o.at > 'infinity'::timestamptz",
        control.test_the_reconciler_ignores_a_workflow_that_makes_progress,
    )  # fmt: skip


JUDGE = "schema/0019_around_the_work/71_judge_handled_failure"
MUTANTS = [
    Mutant(
        "a failure branch that runs after a success", JUDGE, "else 'UNMET' end", "else new.state end",
        lambda db: branches.test_a_node_that_handles_two_failures_runs_if_one_of_them_happens(db, (), "SKIPPED"),
    ),
    Mutant(
        "a failure branch that takes a skipped node for a failed one", JUDGE,
        "('FAILED', 'CANCELLED', 'EXPIRED') then 'MET'", "('FAILED', 'CANCELLED', 'EXPIRED', 'SKIPPED') then 'MET'",
        branches.test_the_failure_of_a_skipped_node_is_not_handled,
    ),
    Mutant(
        "a delay that begins again after a pause", "workflow/enqueue_nodes", "when b.task_id is not null then", "when false then",
        branches.test_a_pause_does_not_begin_a_delay_again,
    ),
    Mutant(
        "a first result that does not know what ended first", "workflow/list_result_sizes",
        "coalesce(t.completed_at, n.ended_at)", "null::timestamptz",
        branches.test_of_two_results_the_one_that_came_first_is_passed_on,
    ),
    Mutant(
        "a start by a task that lost its lease", "step/hold_parent", "t.claim_id = %(claim_id)s and t.state = 'RUNNING'", "t.state = 'RUNNING'",
        started.test_a_task_that_lost_its_lease_starts_no_workflow,
    ),
    Mutant(
        "a start by a task with a requested cancel", "step/hold_parent", "t.cancel_requested_at is not null as is_cancelled", "false as is_cancelled",
        started.test_a_task_with_a_requested_cancel_starts_no_further_workflow,
    ),
    Mutant(
        "a start that does not lock the row of its task", "step/hold_parent", "\nfor no key update of t", "",
        started.test_a_workflow_that_is_started_during_the_cancel_of_its_parent_is_cancelled_too,
    ),
    Mutant(
        "a start that ignores its recorded step", "step/hold_parent", "s.kind = 'child' and s.name", "false and s.name",
        started.test_a_pruned_workflow_is_not_started_again,
    ),
    Mutant(
        "a cancel that skips paused workflows", "workflow/cancel_started",
        "and w.state in ('RUNNING', 'PAUSED')\n    order", "and w.state = 'RUNNING'\n    order",
        started.test_a_cancel_reaches_the_workflows_that_a_task_and_its_children_started,
    ),
    Mutant(
        "a cancel that skips workflows of children", "workflow/cancel_started",
        "select t.id from family f join {schema}.all_tasks t on t.parent_id = f.id", "select f.id from family f",
        started.test_a_cancel_reaches_the_workflows_that_a_task_and_its_children_started,
    ),
    Mutant(
        "a cancelled workflow that skips workflows that its tasks started", "workflow/withdraw_tasks", "on w.parent_task_id = s.id", "on false",
        lambda db: started.test_a_cancelled_workflow_cancels_the_workflows_that_its_tasks_started(db, False),
    ),
    Mutant(
        "a cancelled workflow that skips workflows that children of its tasks started", "workflow/withdraw_tasks",
        "select f.id, f.workflow_id from family f\n        union", "select f.id, f.workflow_id from family f where false\n        union",
        lambda db: started.test_a_cancelled_workflow_cancels_the_workflows_that_its_tasks_started(db, True),
    ),
    Mutant(
        "a cancel that skips workflows of an earlier task of the node", "workflow/cancel_started",
        "select p.id\n    from", "select o.id\n    from",
        lambda db: started.test_a_retried_node_cancels_the_children_and_workflows_of_its_earlier_task(db, "task", 2),
    ),
    Mutant(
        "a cancel that skips children of an earlier task of the node", "task/cancel_children",
        "select p.id\n    from", "select o.id\n    from",
        lambda db: started.test_a_retried_node_cancels_the_children_and_workflows_of_its_earlier_task(db, "task", 2),
    ),
    Mutant(
        "a cancel that reaches a workflow that was only found by its key", "workflow/cancel_started",
        "f.parent_task_id, g.parent_id) and p.workflow_id = o.workflow_id and p.node = o.node\n", "f.parent_task_id, g.parent_id)\n",
        started.test_a_cancel_ignores_a_workflow_that_another_task_started_with_the_same_key,
    ),
    Mutant(
        "a cancelled workflow that skips children and workflows of earlier tasks of its nodes", "workflow/withdraw_tasks",
        "where o.iteration > 1", "where o.iteration > 2",
        lambda db: started.test_a_retried_node_cancels_the_children_and_workflows_of_its_earlier_task(db, "workflow", 2),
    ),
    Mutant(
        "a map of workflows whose members are tasks", "workflow/expand_map", "n.graph is not null as is_of_workflows", "false as is_of_workflows",
        maps_of_workflows.test_each_item_of_a_map_is_the_input_of_a_separate_workflow,
    ),
    Mutant(
        "a member that does not find the graph of its map", "workflow/list_compositions", "and m.number = n.member_of", "and m.number = n.number",
        maps_of_workflows.test_each_item_of_a_map_is_the_input_of_a_separate_workflow,
    ),
    Mutant(
        "a member that version 11 can create without a task", "schema/0012_step_digest/20_nodes_task",
        "task is not null or kind <> 'task' or member_of is null or state <> 'READY'", "true",
        maps_of_workflows.test_code_of_version_11_cannot_create_a_member_without_a_task,
    ),
    Mutant(
        "a retried node that keeps a past good_until", "workflow/enqueue_nodes", "b.state in ('EXPIRED', 'FAILED')", "b.state = 'EXPIRED'",
        resilience.TestRetries().test_a_retry_of_a_node_whose_task_started_in_time_drops_its_good_until,
    ),
    Mutant(
        "two workers that advance one workflow at once", "workflow/lock_workflows", "for no key update skip locked", "",
        advance.test_a_step_skips_a_workflow_that_another_worker_holds,
    ),
    Mutant(
        "an end of a task that creates no event", "schema/0004_workflows/14_tasks_ended", "new.workflow_id is not null and", "false and",
        advance.test_a_chain_passes_results_to_the_next_node,
    ),
    Mutant(
        "two starts with one key", "schema/0004_workflows/02_workflows_key", "create unique index", "create index",
        advance.test_two_workflows_with_one_key_are_one_while_the_first_is_live,
    ),
    Mutant(
        "a node that is enqueued twice", "workflow/enqueue_nodes", "and n.state || '' in ('PENDING', 'READY')", "",
        advance.test_a_node_that_is_enqueued_twice_sends_one_task_or_child,
    ),
    Mutant(
        "a task id that does not derive from its node", "workflow/enqueue_nodes", "on conflict (id) do nothing", "",
        advance.test_a_node_that_forgot_its_task_does_not_send_it_again,
    ),
    Mutant(
        "a failure that satisfies an edge", "workflow/record_ended_nodes", "when (c.state = 'COMPLETED' or e.tolerates)",
        "when (true or e.tolerates)",
        joins("all", "p1", expected="SKIPPED"),
    ),
    Mutant(
        "an outcome that is not passed on", "workflow/record_ended_nodes", "when (c.state = 'COMPLETED' or e.tolerates)",
        "when (c.state = 'COMPLETED')",
        advance.test_a_node_that_wants_the_outcome_receives_the_error_of_a_failed_or_skipped_parent,
    ),
    Mutant(
        "a condition that always holds", "workflow/record_ended_nodes", "(e.expects is null or", "(true or",
        lambda db: advance.test_a_condition_selects_the_branch_that_runs(db, False, "SKIPPED", "COMPLETED"),
    ),
    Mutant(
        "a missing result that is treated as present", "workflow/record_ended_nodes", "when t.state = 'COMPLETED' and t.result is null then 'FAILED'",
        "when t.state = 'COMPLETED' and t.result is null then 'COMPLETED'",
        missing("update {schema}.tasks set result = null", "RESULT_NOT_AVAILABLE"),
    ),
    Mutant(
        "a missing task that is waited for", "workflow/record_ended_nodes", "when n.kind = 'task' and t.id is null then 'FAILED'", "",
        missing("delete from {schema}.tasks", "RESULT_NOT_AVAILABLE"),
    ),
    Mutant(
        "a node that starts before its parents have ended", "workflow/resolve_nodes", "where not j.fails and not j.waits and",
        "where not j.fails and",
        advance.test_a_node_waits_for_all_of_its_parents,
    ),
    Mutant(
        "a node that starts without its quorum", "workflow/resolve_nodes", "and (j.quorum is null or j.met >= j.quorum)", "",
        advance.test_a_quorum_node_waits_for_its_quorum,
    ),
    Mutant(
        "a wait for an impossible quorum", "workflow/resolve_nodes", "(j.fails or j.met + j.open < j.quorum)", "j.fails",
        joins(2, "p0", "p2", expected="SKIPPED"),
    ),
    Mutant(
        "a skip that creates no event", "workflow/resolve_nodes", "select s.workflow_id, s.number from skipped s",
        "select s.workflow_id, s.number from skipped s where false",
        joins("all", "p1", expected="SKIPPED"),
    ),
    Mutant(
        "a map that ends before its members", "workflow/resolve_nodes", "where c.state = 'ENQUEUED' and not exists (",
        "where c.state = 'ENQUEUED' and true or not exists (",
        advance.test_a_map_returns_the_list_of_its_members_results,
    ),
    Mutant(
        "a cancel that waits for the row of a child", "workflow/withdraw_tasks", "for no key update of w skip locked", "for no key update of w",
        lambda db: control.test_two_steps_that_stop_or_resume_each_others_children_do_not_deadlock(db, "cancel"),
    ),
    Mutant(
        "a resume that waits for the row of a child", "workflow/resume_children", "for no key update of w skip locked", "for no key update of w",
        lambda db: control.test_two_steps_that_stop_or_resume_each_others_children_do_not_deadlock(db, "resume"),
    ),
    Mutant(
        "a child that another worker holds and that is not revisited", "workflow/withdraw_tasks", "select w.workflow_id, null::integer from waits w",
        "select w.workflow_id, null::integer from waits w where false",
        control.test_a_step_does_not_repeat_at_once_for_a_child_that_another_worker_holds,
    ),
    Mutant(
        "a map that ignores a missing member", "workflow/resolve_nodes", ") < c.members then 'FAILED'", ") < 0 then 'FAILED'",
        control.test_a_map_fails_if_the_row_of_a_member_was_deleted,
    ),
    Mutant(
        "members of a map over a result ordered behind all other nodes", "workflow/find_ended_workflows",
        "order by coalesce(n.member_of, n.number), n.kind = 'map', n.number limit 1",
        "order by n.number limit 1", advance.test_the_error_of_a_workflow_names_the_first_failed_node_in_the_order_of_addition,
    ),
    Mutant(
        "a retry that keeps closed edges", "workflow/retry_workflow", "and e.parent = a.number and e.state <> 'OPEN'", "and false",
        retries.test_a_retry_repeats_nodes_that_consumed_an_outcome,
    ),
    Mutant(
        "a retry that does not reopen edges to pending nodes", "workflow/retry_workflow", "and c.state || '' = 'PENDING'", "and false",
        retries.test_a_pending_node_receives_only_the_outcome_of_the_retry,
    ),
    Mutant(
        "a retry that keeps the members of a map over the old list", "workflow/retry_workflow", "where a.is_emptied and m.", "where false and m.",
        retries.test_a_retry_rebuilds_a_map_if_its_list_runs_again_and_keeps_its_members_otherwise,
    ),
    Mutant(
        "a reopened completed node that keeps its old steps", "workflow/enqueue_nodes", "where not b.is_whole and", "where true and",
        retries.test_a_reopened_completed_node_starts_without_its_steps_and_a_failed_one_keeps_them,
    ),
    Mutant(
        "a retry that is applied twice", "workflow/hold_for_retry", "w.retry_call is not distinct from %(call)s::uuid as is_done", "false as is_done",
        control.test_a_repeated_retry_of_a_workflow_is_not_applied_twice,
    ),
    Mutant(
        "a pause that lets claimed tasks start", "workflow/withdraw_tasks", "where t.id = h.id and h.state in ('PENDING', 'CLAIMED')",
        "where t.id = h.id and h.state = 'PENDING'", control.test_a_claimed_task_of_a_paused_workflow_cannot_start,
    ),
    Mutant(
        "a pause that repeats recorded steps", "workflow/withdraw_tasks",
        "t.attempt = 0 and t.checkpoint is null and not exists (select from {schema}.steps s where s.task_id = t.id)", "true",
        begun.test_a_pause_of_a_workflow_keeps_a_task_that_has_recorded_a_step,
    ),
    Mutant(
        "a child that continues while its parent is stopped", "workflow/withdraw_tasks",
        "where n.kind = 'workflow' and n.state = 'ENQUEUED'",
        "where false", control.test_nested_workflows_pause_resume_and_cancel_with_their_parent,
    ),
    Mutant(
        "a cancel that does not reach running tasks", "workflow/withdraw_tasks",
        "where t.id = h.id and h.state = 'RUNNING' and h.doing = 'CANCELLING'",
        "where t.id = h.id and h.state = 'NONE' and h.doing = 'CANCELLING'", control.test_a_cancel_skips_pending_nodes_and_asks_running_tasks_to_stop,
    ),
    Mutant(
        "a workflow that ends before its nodes", "workflow/find_ended_workflows", "and not exists (", "and 1 = any (select 1 union ",
        advance.test_a_chain_passes_results_to_the_next_node,
    ),
    Mutant(
        "a parent that does not learn of its child's end", "workflow/finish_workflows", "where e.parent_id is not null", "where false",
        advance.test_a_nested_workflow_receives_its_input_and_returns_its_output,
    ),
    Mutant(
        "a child started twice", "workflow/adopt_child", "and n.state in ('PENDING', 'READY')", "",
        advance.test_a_node_that_is_enqueued_twice_sends_one_task_or_child,
    ),
    Mutant(
        "a retry of completed nodes", "workflow/retry_workflow", "where n.workflow_id = a.workflow_id and n.number = a.number\n), opened",
        "where n.workflow_id = a.workflow_id\n), opened",
        control.test_a_retry_of_a_workflow_repeats_failed_nodes_and_keeps_completed_ones,
    ),
    Mutant(
        "a retry that ignores what an earlier retry did", "workflow/retry_workflow", "set state = 'OPEN'", "set state = e.state",
        control.test_a_retry_of_a_workflow_repeats_failed_nodes_and_keeps_completed_ones,
    ),
    Mutant(
        "a retry that repeats recorded steps", "workflow/enqueue_nodes", "where m.iteration > 1", "where false",
        begun.test_a_retry_of_a_workflow_keeps_the_recorded_steps_of_its_tasks,
    ),
    Mutant(
        "a map whose last member number is missing", "workflow/resolve_nodes", "n.first_member::bigint + n.members", "n.first_member + n.members",
        broken.test_a_map_node_with_a_damaged_kind_fails_in_its_next_step,
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
def test_a_mutant_of_a_workflow_statement_fails_its_test(
    mutant: Mutant, scenario: Callable[[Mutant | None], StoreHarness]
) -> None:
    assert not notices(mutant, scenario(None)), "the unchanged protocol passes its own test"
    assert notices(mutant, scenario(mutant)), f"no test failed: {mutant.why}"
