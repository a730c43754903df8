"""What a marked task needs of the code of a worker, what live workers registered, and which of them cannot run it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final
from uuid import UUID

import msgspec
from msgspec import Struct

from everbeat.domain.parameters import ARGUMENTS, Parameters

UNREADABLE: Final = "(unreadable)"
"""Stands for a mark that cannot be read, which no worker fits."""


class Needs(Struct, frozen=True):
    """What a marked task needs: the names of the `arguments` that it gives, and the keys of requirements of `other` kinds.

    A worker fits if it takes every argument and requires no more. This version knows only arguments, so it never fits another kind.
    """

    arguments: tuple[str, ...] = ()
    other: tuple[str, ...] = ()


class Registered(Struct, frozen=True):
    """Live workers that registered the same parameters of a task function; None: they registered none, and are believed to fit."""

    parameters: Parameters | None
    workers: tuple[str, ...]


class Misfit(Struct, frozen=True):
    """Live workers that do not take the `unknown` arguments of a task, and require the `missing` ones, which it does not give."""

    workers: tuple[str, ...]
    unknown: tuple[str, ...]
    missing: tuple[str, ...]


class Marked(Struct, frozen=True):
    """PENDING tasks of one name in one queue that need the same, and one of them."""

    name: str
    queue: str
    needs: Needs
    waiting: int
    task_id: UUID


class Knowing(Struct, frozen=True):
    """Live workers that know a task function and serve the same queues (None: all)."""

    name: str
    queues: tuple[str, ...] | None
    registered: Registered


def read_needs(document: str | None) -> Needs | None:
    """Return what the column `tasks.needs` says; None for a task that is not marked."""
    if document is None:
        return None
    try:
        found = msgspec.json.decode(document, type=dict[str, msgspec.Raw])
        arguments = msgspec.json.decode(found.pop(ARGUMENTS, msgspec.Raw(b"[]")), type=tuple[str, ...])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return Needs(other=(UNREADABLE,))
    return Needs(arguments=tuple(sorted(set(arguments))), other=tuple(sorted(found)))


def read_parameters(document: str | None) -> Parameters | None:
    """Return what a worker registered of one task function; None if it registered nothing that can be read."""
    if document is None:
        return None
    try:
        return msgspec.json.decode(document, type=Parameters)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


def read_registered(document: str | None) -> tuple[Registered, ...]:
    """Return what live workers registered of one task function, from pairs of a document and worker ids."""
    pairs = (
        []
        if document is None
        else msgspec.json.decode(document, type=list[tuple[str | None, tuple[str, ...]]])
    )
    return tuple(Registered(read_parameters(told), workers) for told, workers in pairs)


def misfits(needs: Needs, registered: Iterable[Registered]) -> tuple[Misfit, ...]:
    """Return the workers that cannot run the task; those that lack the same are together, the most workers come first."""
    found: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = {}
    for each in registered:
        lack = _lack(needs, each.parameters)
        if any(lack) or needs.other:
            found.setdefault(lack, []).extend(each.workers)
    alike = [Misfit(tuple(sorted(workers)), *lack) for lack, workers in found.items()]
    return tuple(sorted(alike, key=lambda each: (-len(each.workers), each.workers)))


def _lack(needs: Needs, accepts: Parameters | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if accepts is None:
        return (), ()
    return accepts.unknown(needs.arguments), accepts.missing(needs.arguments)
