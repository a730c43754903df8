"""Mutants of the functions that move tasks: each reason to stay is left out once, and the test of its promise must fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.maintenance import test_history as moves
from tests.maintenance import test_history_races as races
from tests.maintenance import test_history_sizes as sizes
from tests.store.conftest import StoreHarness
from tests.store.test_mutants import Mutant, notices, scenario

__all__ = ["scenario"]

MOVE, RECALL = "schema/0018_bounded_moves/10_move_to_history", "schema/0019_around_the_work/64_recall_many"

MUTANTS = [
    Mutant(
        "a task that moves at once", MOVE, "<= statement_timestamp() - p_age", "<= statement_timestamp()",
        moves.test_a_task_moves_an_hour_after_its_end_with_all_its_records,
    ),
    Mutant(
        "a task of a live workflow that moves", MOVE, "and w.ended_at is not null order by", "order by",
        moves.test_a_task_of_a_live_workflow_stays,
    ),
    Mutant(
        "a move that does not lock the workflow", MOVE, " order by w.id for share skip locked", "",
        moves.test_a_task_of_a_live_workflow_stays,
    ),
    Mutant(
        "a child of a live parent that moves", MOVE, "not in ('PENDING', 'CLAIMED', 'RUNNING')", "not in ('NEVER')",
        moves.test_a_task_stays_as_long_as_its_parent_lives,
    ),
    Mutant(
        "a task whose key is taken that moves", MOVE, "case when t.unique_key is not null then (", "case when false then (",
        lambda db: moves.test_a_task_stays_as_long_as_its_key_is_taken(db, "kept", "null", 0),
    ),
    Mutant(
        "a kept result that moves", MOVE, "position('\"keep_result_ms\"' in t.policy::text) > 0", "false",
        moves.test_a_task_stays_as_long_as_its_result_is_stored_for_a_time,
    ),
    Mutant(
        "a move beside a tree with older code", MOVE, "coalesce(s.code, 0) < 17", "s.code < 17",
        moves.test_nothing_moves_while_a_tree_with_older_code_lives,
    ),
    Mutant(
        "a move of what retention deletes soon", MOVE, "and (p_kept is null or e.at >= p_kept)", "",
        moves.test_a_task_whose_retention_is_over_stays_for_the_pruner,
    ),
    Mutant(
        "a move that waits for a lock", MOVE, "for update of t skip locked", "for update of t nowait",
        moves.test_a_locked_task_stays_and_no_session_waits,
    ),
    Mutant(
        "a step without a limit in bytes", MOVE, "s.bytes <= 33554432", "true",
        sizes.test_a_step_moves_a_limited_number_of_bytes,
    ),
    Mutant(
        "a step that goes on behind tasks that it has not decided on", MOVE, "next_after := v_last;", "null;",
        sizes.test_a_step_moves_a_limited_number_of_bytes,
    ),
    Mutant(
        "a step that moves nothing if its first task is large", MOVE, "s.number <= 1 or ", "",
        sizes.test_a_task_larger_than_a_step_moves_alone,
    ),
    Mutant(
        "a step without a limit for uncompressed records", MOVE, "s.in_records <= 134217728", "true",
        sizes.test_a_step_moves_a_limited_number_of_uncompressed_bytes,
    ),
    Mutant(
        "a measure of the compressed sizes only", MOVE, "array[false, true]", "array[false, false]",
        sizes.test_a_step_moves_a_limited_number_of_uncompressed_bytes,
    ),
    Mutant(
        "a second round that is left out too often", MOVE, "v_in_records * 255", "v_in_records",
        sizes.test_a_step_moves_a_limited_number_of_uncompressed_bytes,
    ),
    Mutant(
        "a task that moves although its records are too large", MOVE, " > 268435456 as stays", " > 1e12 as stays",
        sizes.test_a_task_whose_records_are_too_large_stays_and_those_behind_it_move,
    ),
    Mutant(
        "a recall that leaves the recoveries behind", RECALL, "cross join lateral unnest(b.recoveries) x",
        "cross join lateral unnest(b.recoveries) x where false",
        moves.test_a_task_comes_back_exactly_as_it_was,
    ),
    Mutant(
        "a recall that does not wait for a move of the workflow", RECALL, "order by w.id for no key update", "order by w.id",
        races.test_a_retry_of_a_workflow_waits_for_a_move_of_its_tasks,
    ),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.why)
def test_a_mutant_of_the_history_fails_its_test(
    mutant: Mutant, scenario: Callable[[Mutant | None], StoreHarness]
) -> None:
    assert not notices(mutant, scenario(None)), "the unchanged protocol passes its own test"
    assert notices(mutant, scenario(mutant)), f"no test failed: {mutant.why}"
