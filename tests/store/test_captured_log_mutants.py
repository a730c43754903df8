"""Mutants of the statements of captured logs: each guard is left out once, and the test of its promise must fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.store import test_captured_logs as logs
from tests.store.conftest import StoreHarness
from tests.store.test_mutants import Mutant, notices, scenario

__all__ = ["scenario"]

WRITE, LIST, PRUNE = "log/write_parts", "log/list_logs", "retention/prune_logs"

MUTANTS = [
    Mutant(
        "an old state that replaces a newer one", WRITE, "where (attempt_logs.first", "where true or (attempt_logs.first",
        logs.test_a_repeated_or_late_part_never_replaces_a_newer_state,
    ),
    Mutant(
        "a part that is written only once", WRITE, "where (attempt_logs.first", "where false and (attempt_logs.first",
        logs.test_a_repeated_or_late_part_never_replaces_a_newer_state,
    ),
    Mutant(
        "a log of a deleted task", WRITE, "is not null\norder", "is not null or true\norder",
        logs.test_the_log_of_a_task_that_was_deleted_is_not_stored,
    ),
    Mutant(
        "a log of two claims", LIST, "(l.attempt, l.claim_id) < (f.attempt, f.claim_id)", "l.attempt < f.attempt",
        logs.test_a_claim_writes_only_its_own_log_also_after_it_lost_the_task,
    ),
    Mutant(
        "a list without an end", LIST, "where f.place < %(limit)s", "where f.place < %(limit)s + 1000",
        logs.test_only_the_newest_logs_are_listed,
    ),
    Mutant(
        "logs of a task that exists are pruned", PRUNE, "not exists (select from {schema}.tasks t where t.id = w.task_id)", "true",
        logs.test_pruning_walks_past_any_number_of_tasks_that_are_kept,
    ),
    Mutant(
        "old logs stay", PRUNE, "j.is_stray or", "j.is_stray and",
        logs.test_retention_deletes_old_logs_and_those_of_deleted_tasks_in_small_steps,
    ),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.why)
def test_a_mutant_of_the_captured_logs_fails_its_test(
    mutant: Mutant, scenario: Callable[[Mutant | None], StoreHarness]
) -> None:
    assert not notices(mutant, scenario(None)), "the unchanged statements pass their own test"
    assert notices(mutant, scenario(mutant)), f"no test failed: {mutant.why}"
