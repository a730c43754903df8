"""The requirements of tasks, the parameters that workers register, and whether they match."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Final
from uuid import UUID

import msgspec
from msgspec import Struct

ARGUMENTS: Final = "arguments"
"""The key under which `tasks.needs` stores the names of the task's arguments."""
LIMITS: Final = "limits"
"""The key in `tasks.needs` of a task that has limits. Each worker of this version meets this need."""


class Parameters(Struct, frozen=True):
    """The names of the arguments that a task function accepts (`takes`) and requires (`requires`).

    If `takes` is None, the function accepts any name. This version never registers None, because a call stores the extra keywords
    of `**options` under the single name `options`.
    """

    takes: tuple[str, ...] | None
    requires: tuple[str, ...] = ()

    def fits(self, given: Collection[str]) -> bool:
        """Return whether the function accepts every given name, and every required name is given."""
        return not self.unknown(given) and not self.missing(given)

    def unknown(self, given: Collection[str]) -> tuple[str, ...]:
        """Return the given names that the function does not accept."""
        return () if self.takes is None else tuple(sorted(set(given).difference(self.takes)))

    def missing(self, given: Collection[str]) -> tuple[str, ...]:
        """Return the required names that are not given."""
        return tuple(sorted(set(self.requires).difference(given)))

    def fits_needs(self, needs: bytes | str) -> bool:
        """Return whether the function meets all requirements in `tasks.needs`. A requirement of an unknown type is never met."""
        try:
            known = _NEEDS.decode(needs)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return False
        return known.limits if known.arguments is None else self.fits(known.arguments)

    def to_json(self) -> dict[str, Any]:
        """Return the parameters in the form that a worker registers in `workers.metadata`."""
        return {
            "takes": None if self.takes is None else sorted(self.takes),
            "requires": sorted(self.requires),
        }


class _Needs(Struct, forbid_unknown_fields=True):
    arguments: list[str] | None = None
    limits: bool = False


_NEEDS: Final = msgspec.json.Decoder(_Needs)


def given_names(arguments: bytes | str) -> frozenset[str] | None:
    """Return the names of the arguments in a stored JSON object, or None if the object cannot be read."""
    try:
        return frozenset(_OBJECT.decode(arguments))
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


_OBJECT: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])

UNREADABLE: Final = "(unreadable)"
"""Represents unreadable requirements, which no worker meets."""


class Needs(Struct, frozen=True):
    """The requirements of a marked task: the names of its `arguments`, and the keys of `other` types of requirements.

    A worker is suitable if it accepts every argument and requires no others. This version knows only arguments and limits, so it
    never meets requirements of another type.
    """

    arguments: tuple[str, ...] = ()
    other: tuple[str, ...] = ()


class Registered(Struct, frozen=True):
    """Live workers that registered the same `parameters` for a task function. If `parameters` is None, the workers count as suitable."""

    parameters: Parameters | None
    workers: tuple[str, ...]


class UnfitWorkers(Struct, frozen=True):
    """Live workers that do not accept the `unknown` arguments of a task, or require its `missing` arguments.

    `takes` contains names that the workers accept but the task does not pass. These names are suggested in place of an unknown name.
    """

    workers: tuple[str, ...]
    unknown: tuple[str, ...]
    missing: tuple[str, ...]
    takes: tuple[str, ...] = ()


class MarkedTasks(Struct, frozen=True):
    """A group of PENDING tasks with the same name, queue and needs. `waiting` is their number, and `task_id` the id of one of them."""

    name: str
    queue: str
    needs: Needs
    waiting: int
    task_id: UUID


class KnowingWorkers(Struct, frozen=True):
    """Live workers that registered a task function and serve the same `queues`. None means all queues."""

    name: str
    queues: tuple[str, ...] | None
    registered: Registered


def read_needs(document: str | None) -> Needs | None:
    """Return the requirements from the column `tasks.needs`, or None if the task is not marked."""
    if document is None:
        return None
    try:
        found = msgspec.json.decode(document, type=dict[str, msgspec.Raw])
        if found.pop(LIMITS, None) is not None and not found:
            return None
        arguments = msgspec.json.decode(found.pop(ARGUMENTS, msgspec.Raw(b"[]")), type=tuple[str, ...])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return Needs(other=(UNREADABLE,))
    return Needs(arguments=tuple(sorted(set(arguments))), other=tuple(sorted(found)))


def read_parameters(document: str | None) -> Parameters | None:
    """Return the parameters that a worker registered for a task function, or None if they are absent or unreadable."""
    if document is None:
        return None
    try:
        return msgspec.json.decode(document, type=Parameters)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


def read_registered(document: str | None) -> tuple[Registered, ...]:
    """Return live workers' registrations for one task function. `document` is a JSON list of pairs: a registration and its worker ids."""
    pairs = (
        []
        if document is None
        else msgspec.json.decode(document, type=list[tuple[str | None, tuple[str, ...]]])
    )
    return tuple(Registered(read_parameters(found), workers) for found, workers in pairs)


def unfit_workers(needs: Needs, registered: Iterable[Registered]) -> tuple[UnfitWorkers, ...]:
    """Return the workers that cannot run the task, grouped by the mismatch between task and worker, largest group first."""
    found: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = {}
    takes: dict[tuple[tuple[str, ...], tuple[str, ...]], set[str]] = {}
    for each in registered:
        lack = _lack(needs, each.parameters)
        if any(lack) or needs.other:
            found.setdefault(lack, []).extend(each.workers)
            takes.setdefault(lack, set()).update(_spare(needs, each.parameters))
    alike = [
        UnfitWorkers(tuple(sorted(workers)), *lack, takes=tuple(sorted(takes[lack])))
        for lack, workers in found.items()
    ]
    return tuple(sorted(alike, key=lambda each: (-len(each.workers), each.workers)))


def _spare(needs: Needs, accepts: Parameters | None) -> set[str]:
    taken = () if accepts is None or accepts.takes is None else accepts.takes
    return set(taken).difference(needs.arguments)


def _lack(needs: Needs, accepts: Parameters | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if accepts is None:
        return (), ()
    return accepts.unknown(needs.arguments), accepts.missing(needs.arguments)
