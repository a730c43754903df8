"""Test that a record keeps the statements about a task and, of the polls, only the claims that returned it."""

from __future__ import annotations

from tests.surface.shapes import Shapes
from tests.surface.statement_log import Sent
from tests.surface.statement_order import essential

TASK, OTHER = "0a0b", "0c0d"


def sent(*statements: str) -> list[Sent]:
    """Return statements about the task; `name@transaction` sets a transaction, `name!` means another task."""
    made = []
    for each in statements:
        name, _, transaction = each.rstrip("!").partition("@")
        about = OTHER if each.endswith("!") else "" if transaction else TASK
        made.append(Sent(name, f"Parameters: $1 = '{about}'", transaction or None))
    return made


def test_essential_statements_omit_polls_heartbeats_and_other_tasks() -> None:
    found = sent(
        "task/claim_tasks!", "task/insert_task", "task/claim_tasks!", "worker/record_beat", "task/claim_tasks-marked!",
        "task/complete_attempts!", "task/list_outcomes",
        "task/complete_attempts", "task/claim_tasks!",
    )  # fmt: skip
    assert essential(found, {TASK}) == ["task/insert_task", "task/claim_tasks", "task/complete_attempts"]


def test_essential_statements_have_one_claim_for_each_run() -> None:
    found = sent(
        "task/insert_task", "task/claim_tasks!", "task/claim_tasks!", "task/settle_attempts", "task/claim_tasks!", "worker/record_beat",
        "task/claim_tasks!", "task/complete_attempts",
    )  # fmt: skip
    assert essential(found, {TASK}) == [
        "task/insert_task",
        "task/claim_tasks",
        "task/settle_attempts",
        "task/claim_tasks",
        "task/complete_attempts",
    ]


def test_essential_statements_have_a_claim_after_a_recovery_only_if_the_task_runs_again() -> None:
    found = sent(
        "task/insert_task",
        "task/claim_tasks!",
        "task/recover_leases",
        "task/claim_tasks!",
        "worker/end_supervisor",
    )
    kept = essential(found, {TASK}, runs_again=False)
    assert kept == ["task/insert_task", "task/claim_tasks", "task/recover_leases", "worker/end_supervisor"]


def test_essential_statements_keep_whole_transactions_about_the_task() -> None:
    theirs = Sent("workflow/record_ended_nodes", f"Parameters: $1 = '{TASK}'", "1")
    found = [
        *sent("workflow/lock_workflows@1"),
        theirs,
        *sent("workflow/enqueue_nodes@1", "workflow/finish_workflows@2"),
    ]
    assert essential(found, {TASK}) == [
        "workflow/record_ended_nodes (in a transaction)",
        "workflow/enqueue_nodes (in a transaction)",
    ]


def test_essential_statements_show_a_changed_order() -> None:
    right, wrong = (
        sent("task/insert_task", "task/recover_leases", "worker/end_supervisor"),
        sent("task/recover_leases", "task/insert_task"),
    )
    assert essential(right, {TASK}) == ["task/insert_task", "task/recover_leases", "worker/end_supervisor"]
    assert essential(wrong, {TASK}) == ["task/recover_leases", "task/insert_task"]


def test_the_shape_of_json_documents_has_each_key_with_all_its_types() -> None:
    shapes = Shapes()
    shapes.add("title", {"a": [{"b": 1}, {"b": None, "c": 0.5}], "at": "2026-01-01T00:00:00Z"})
    shapes.add("title", {"a": [], "d": "00000000-0000-4000-8000-000000000000"})
    assert shapes.text().splitlines() == [
        "title",
        "  a: array",
        "  a[]: object",
        "  a[].b: integer | null",
        "  a[].c: number",
        "  at: time",
        "  d: id",
    ]
