"""Notes the actions of an operator in the audit log, each in the transaction of the statement that acts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, TypeVar
from uuid import UUID, uuid4

from msgspec import Struct

from everbeat.domain.bulk_actions import Operator
from everbeat.domain.task.questions import is_answer
from everbeat.store import audit
from everbeat.store.plan import Bounded, Plan, Transaction
from everbeat.store.statement import Statement

T = TypeVar("T")


class Note(Struct, frozen=True, kw_only=True):
    """The content of the audit log about a statement. Each function takes the statement's parameters, or its answer.

    `affected` returns the number of changed tasks, or None. `took_effect` returns whether the statement changed anything.
    """

    action: Callable[[Mapping[str, Any]], str]
    target: Callable[[Mapping[str, Any]], str | None]
    note: Callable[[Mapping[str, Any]], str | None] = lambda _: None
    affected: Callable[[Any], int | None] = lambda _: None
    took_effect: Callable[[Any], bool] = bool


def _always(name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda _: name


def _of(name: str) -> Callable[[Mapping[str, Any]], str | None]:
    return lambda values: None if values.get(name) is None else str(values[name])


def _listed(name: str) -> Callable[[Mapping[str, Any]], str | None]:
    return lambda values: ", ".join(str(each) for each in values[name][:20])


def _changes(values: Mapping[str, Any]) -> str | None:
    """Return what a statement changes a task to, or the numbers of a limit."""
    found = {
        name: values.get(name)
        for name in ("to_queue", "to_priority", "concurrency", "starts", "until", "reason")
    }
    told = {
        name: value.astimezone(UTC).isoformat(timespec="seconds") if isinstance(value, datetime) else value
        for name, value in found.items()
    }
    return ", ".join(f"{name}={value}" for name, value in told.items() if value is not None) or None


def _pause(values: Mapping[str, Any]) -> str | None:
    return f"{values['kind']} {values['name']}"


def _was_cancelled(answer: Any) -> bool:
    return answer is not None and (answer[2] or answer[0] == "REQUESTED")


def _was_acted(answer: Any) -> bool:
    return any(each.refusal is None for each in answer)


def _by_name(action: str, **more: Any) -> Note:
    return Note(action=_always(action), target=_of("name"), **more)


def _by_id(action: str, **more: Any) -> Note:
    return Note(action=_always(action), target=_of("id"), **more)


def _any(_: Any) -> bool:
    return True


NOTES: Final[Mapping[str, Note]] = {
    "task/cancel_task": _by_id("cancel", affected=lambda _: 1, took_effect=_was_cancelled),
    "task/retry_task": _by_id(
        "retry", affected=lambda _: 1, took_effect=lambda answer: answer is not None and answer.retried
    ),
    "bulk/change_tasks": Note(
        action=lambda values: str(values["action"]),
        target=lambda values: str(UUID(values["ids"].strip("{}"))),
        note=_changes,
        affected=lambda _: 1,
        took_effect=_was_acted,
    ),
    "bulk/delete_tasks": Note(
        action=_always("delete"),
        target=lambda values: str(UUID(values["ids"].strip("{}"))),
        affected=lambda _: 1,
        took_effect=_was_acted,
    ),
    "signal/send_signal": Note(
        action=lambda values: "answer" if is_answer(values["name"]) else "signal",
        target=_of("target"),
        note=_of("name"),
        took_effect=lambda answer: answer.verdict == "stored",
    ),
    "pause/pause_name": Note(
        action=_always("pause"),
        target=_pause,
        note=_of("reason"),
        took_effect=lambda answer: answer is not None and not answer.already_paused,
    ),
    "pause/resume_name": Note(action=_always("resume"), target=_pause, took_effect=_any),
    "pause/pause_all": Note(
        action=_always("pause"),
        target=_always("everything"),
        note=_of("reason"),
        took_effect=lambda answer: answer is not None and not answer.already_paused,
    ),
    "pause/resume_all": Note(action=_always("resume"), target=_always("everything"), took_effect=_any),
    "workflow/pause_workflow": _by_id("pause_workflow"),
    "workflow/resume_workflow": _by_id("resume_workflow"),
    "workflow/cancel_workflow": _by_id("cancel_workflow"),
    "workflow/retry_workflow": _by_id("retry_workflow", took_effect=_any),
    "batch/seal_batch": _by_id("seal_batch"),
    "batch/mark_cancelled": _by_id("cancel_batch", took_effect=lambda has_ended: has_ended is False),
    "limit/set_limit": _by_name("set_limit", note=_changes),
    "limit/clear_limit": _by_name("clear_limit"),
    "schedule/put_schedule": Note(
        action=_always("put_schedule"),
        target=lambda values: str(audit.name_in(values["schedule"])),
        took_effect=lambda answer: answer.verdict != "declared",
    ),
    "schedule/pause_schedule": _by_name("pause_schedule", note=_of("reason")),
    "schedule/resume_schedule": _by_name("resume_schedule"),
    "schedule/run_schedule": _by_name(
        "run_schedule", took_effect=lambda answer: answer is not None and answer.task_id is not None
    ),
    "schedule/backfill_ticks": _by_name("backfill_schedule", affected=lambda answer: answer),
    "schedule/delete_schedule": _by_name("delete_schedule"),
    "worker/set_quiet": Note(
        action=lambda values: "quiet_workers" if values["quiet"] else "resume_workers",
        target=lambda values: (
            "everyone" if values["everyone"] else values["host"] or ", ".join(values["ids"])
        ),
    ),
    "worker/bury_workers": Note(action=_always("bury_workers"), target=_listed("worker_ids")),
    "task/recover_leases": Note(
        action=_always("recover"), target=_listed("ids"), note=_of("noticed_by"), affected=len
    ),
}
"""The statements of operators, and what the audit log contains about each of them."""


def noted(plan: Plan[T], operator: Operator) -> Plan[T]:
    """Return a plan that does the same, and notes the actions of the operator.

    A statement with a note runs in one transaction with it, so neither is stored without the other.
    """
    answer: Any = None
    failure: BaseException | None = None
    try:
        while True:
            try:
                step = plan.send(answer) if failure is None else plan.throw(failure)
            except StopIteration as end:
                value: T = end.value
                return value
            try:
                answer, failure = (yield _noted_step(step, operator)), None
            except GeneratorExit:
                raise
            except BaseException as error:  # noqa: BLE001 - the plan can handle the error; otherwise `throw` raises it
                failure = error
    finally:
        plan.close()


def _noted_step(step: Any, operator: Operator) -> Any:
    call = uuid4()
    match step:
        case Transaction():
            return Transaction(partial(_noted_transaction, step.make, operator, call))
        case Statement() if step.name in NOTES:
            return Transaction(partial(_noted_transaction, partial(_one, step), operator, call))
        case Bounded() if step.statement.name in NOTES:
            return Transaction(partial(_noted_transaction, partial(_one, step.statement), operator, call))
        case _:
            return step


def _one(statement: Statement[T]) -> Plan[T]:
    answer: T = yield statement
    return answer


def _noted_transaction(make: Callable[[], Plan[T]], operator: Operator, call: UUID) -> Plan[T]:
    """Run the statements of a transaction, and write one note, about the last of them that has one and took effect."""
    plan, answer, last = make(), None, None
    while True:
        try:
            step = plan.send(answer)
        except StopIteration as end:
            if last is not None:
                yield last
            value: T = end.value
            return value
        answer = yield step
        if (
            isinstance(step, Statement)
            and (note := NOTES.get(step.name)) is not None
            and note.took_effect(answer)
        ):
            last = audit.record(
                operator,
                note.action(step.parameters),
                target=note.target(step.parameters),
                note=note.note(step.parameters),
                affected=note.affected(answer),
                call=call,
            )
