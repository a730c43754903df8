"""Sends with a scope of uniqueness or an answer to duplicates."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from msgspec import Struct

from everbeat.client.options import SendSettings
from everbeat.client.task import Call
from everbeat.domain.settings.settings import refused
from everbeat.domain.settings.units import milliseconds, respelled
from everbeat.domain.task.uniqueness import EXISTING, LIVE, stored_scope
from everbeat.errors import DuplicateTask, SendError
from everbeat.store.plan import Plan, ask
from everbeat.store.tasks import KEY_TRIES, NewTask
from everbeat.store.unique_tasks import UniqueTask, insert_unique_tasks


class Sent(Struct, frozen=True):
    """The task that a call has become. `existed`: the task had the key of the call before."""

    id: UUID
    existed: bool


def require_key(name: str, settings: SendSettings) -> None:
    """Raise ConfigurationError if `unique_for` or `on_duplicate` is set without a key."""
    if settings.key is not None or settings.is_plain:
        return
    option, value = (
        ("unique_for", settings.unique_for)
        if settings.unique_for != LIVE
        else ("on_duplicate", settings.on_duplicate)
    )
    raise refused(
        respelled(value),
        subject=f"{option} of task {name!r}",
        code="CONTRADICTION",
        rule="is about tasks with the same key, but the send has no key",
        fix=f"add with_options(key=...), or omit {option}",
        shell_fix=f"add --key TEXT, or omit --{option.replace('_', '-')}",
    )


def require_plain(name: str, settings: SendSettings, *, what: str) -> None:
    """Raise ConfigurationError if `unique_for` or `on_duplicate` is set. `what` is the kind of task that does not support them."""
    if settings.is_plain:
        return
    raise refused(
        {"unique_for": respelled(settings.unique_for), "on_duplicate": settings.on_duplicate},
        subject=f"options of task {name!r}",
        code="CONTRADICTION",
        rule=f"{what} supports only the defaults of unique_for and on_duplicate",
        fix=f'use task.with_options(unique_for="{LIVE}", on_duplicate="{EXISTING}")',
    )


def unique_task(settings: SendSettings, task: NewTask) -> UniqueTask:
    """Return the task with the meaning of its key."""
    latest = settings.at_latest
    return UniqueTask(
        task=task,
        unique_for=stored_scope(settings.unique_for),
        on_duplicate=settings.on_duplicate,
        at_latest_ms=None if latest is None else milliseconds(float(latest)),  # type: ignore[arg-type]
    )


def send_unique(
    calls: Sequence[Call[object]], new: Sequence[NewTask], *, channel: str, joined: bool, tries: int
) -> Plan[list[Sent] | None]:
    """Send tasks, either all or none, and return what each of them has become. Return None if a key changed hands during each try.

    Calls with the same key become one task: the last of them if it replaces, and otherwise the first. Raises DuplicateTask if
    `on_duplicate` is "reject" and the key is taken, or is given twice.
    """
    asked = [unique_task(call.settings, task) for call, task in zip(calls, new, strict=True)]
    chosen, places = _one_for_each_key(asked)
    for _ in range(tries):
        ids = yield from ask(insert_unique_tasks(chosen, channel=channel, joined=joined))
        _raise_rejected(chosen, ids)
        if None not in ids:
            return [
                Sent(task_id, existed=task_id != each.task.id)
                for each, place in zip(asked, places, strict=True)
                if (task_id := ids[place]) is not None
            ]
    return None


def _one_for_each_key(asked: Sequence[UniqueTask]) -> tuple[list[UniqueTask], list[int]]:
    """Return the tasks to send, and for each given task the place of the task that is sent for it."""
    chosen: list[UniqueTask] = []
    places: list[int] = []
    known: dict[tuple[str, str, bool], int] = {}
    for each in asked:
        task = each.task
        place = len(chosen)
        if task.key is not None:
            place = known.setdefault((task.name, task.key, each.unique_for is None), place)
        if place == len(chosen):
            chosen.append(each)
        elif "reject" in (each.on_duplicate, chosen[place].on_duplicate):
            raise DuplicateTask(task.name, str(task.key), task_id=None)
        elif each.on_duplicate == "replace":
            chosen[place] = each
        places.append(place)
    return chosen, places


def _raise_rejected(asked: Sequence[UniqueTask], ids: Sequence[UUID | None]) -> None:
    rejected = [
        (each.task, task_id)
        for each, task_id in zip(asked, ids, strict=True)
        if each.on_duplicate == "reject" and task_id not in (None, each.task.id)
    ]
    if rejected:
        task, holder = rejected[0]
        assert task.key is not None
        assert holder is not None
        raise DuplicateTask(task.name, task.key, task_id=holder, others=len(rejected) - 1)


def key_moves(tasks: Sequence[NewTask]) -> SendError:
    """Return the error of a send whose key was taken and released again during each try."""
    names = ", ".join(sorted({f"{task.name} ({task.key!r})" for task in tasks}))
    return SendError(
        f"The key of {names} was taken and released again during each of {KEY_TRIES} tries to send.",
        task_id=tasks[0].id,
        fix="send again; nothing was stored for it.",
    )
