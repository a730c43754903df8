"""The finished part of a task: its progress, its last checkpoint, and the finished items of each `resume`."""

from __future__ import annotations

import math
from collections.abc import AsyncIterable, Mapping
from itertools import count
from typing import Any, Final, final

import msgspec
from msgspec import Struct

from everbeat.domain.settings.settings import shown
from everbeat.domain.typed_json import Misfit, encode_untyped, require_plain
from everbeat.errors import PayloadError

CHECKPOINT_LIMIT_BYTES: Final = 1_048_576
"""The maximum JSON size of a checkpoint, in bytes, with all `resume` counts. Every finished step rewrites the whole checkpoint."""
NAME_LIMIT: Final = 200

_NOTHING: Final = b"null"


class _Stored(msgspec.Struct):
    value: msgspec.Raw = msgspec.Raw(_NOTHING)
    done: dict[str, int] = {}


_stored = msgspec.json.Decoder(_Stored)


class Checkpoint(Struct, frozen=True):
    """The finished part of a task as JSON. A checkpoint with a higher `number` includes all earlier ones.

    `replaced` is the previous value if this checkpoint changed the value.
    """

    number: int
    data: bytes
    replaced: bytes | None = None


@final
class PartialWork:
    """The finished part of one task, which grows during an attempt. Thread-safe."""

    __slots__ = ("_done", "_exhausted", "_latest", "_numbers", "_value")

    def __init__(self, *, value: bytes = _NOTHING, done: Mapping[str, int] | None = None) -> None:
        self._value = value
        self._done = dict(done or {})
        self._exhausted: set[str] = set()
        self._numbers = count(1)
        self._latest = 0

    @classmethod
    def from_json(cls, data: bytes | str | None) -> PartialWork:
        """Return the finished part that earlier attempts stored. If nothing was stored or the data is unreadable, the part is empty."""
        if data is None:
            return cls()
        try:
            stored = _stored.decode(data)
        except (msgspec.MsgspecError, UnicodeError):
            stored = _Stored()
        return cls(value=bytes(stored.value), done={name: max(0, n) for name, n in stored.done.items()})

    @property
    def last(self) -> Any:
        """Return a fresh copy of the last checkpoint's value as plain JSON values, or None if there is no checkpoint yet."""
        return msgspec.json.decode(self._value)

    def checkpoint(self, value: object, *, task_name: str) -> Checkpoint:
        """Return the next checkpoint with this value. Raises PayloadError, and changes nothing, if the value cannot be stored."""
        try:
            data = encode_untyped(value)
        except Misfit as misfit:
            raise _unstorable(misfit, task_name, fix=misfit.fix) from None
        _require_room(_document(data, self._done), value, task_name=task_name)
        try:
            require_plain(value, data)
        except Misfit as misfit:  # the fix of this Misfit would mention annotations
            raise _unstorable(misfit, task_name, fix=None) from None
        replaced, self._value = self._value, data
        return self._next(replaced=replaced)

    def take_back(self, checkpoint: Checkpoint) -> None:
        """Restore the value from before a rejected checkpoint, unless a later checkpoint exists. Finished steps remain finished."""
        if checkpoint.replaced is not None and self._latest == checkpoint.number:
            self._value = checkpoint.replaced

    def steps(self, name: str, *, total: int | None, task_name: str) -> Steps:
        """Return the steps of one `resume`. Raises PayloadError if the name is invalid or a loop with this name has already finished."""
        if not isinstance(name, str) or not 1 <= len(name) <= NAME_LIMIT or not name.isprintable():
            raise PayloadError(
                f"The name {shown(name)} of a resume in task {task_name!r} is not a printable text of 1 to {NAME_LIMIT} characters.",
                parameter="name",
                fix="name the steps by a short text such as 'frame'.",
            )
        if name in self._exhausted:
            raise PayloadError(
                f"Task {task_name!r} resumes {name!r} again in the same attempt, although all its steps are already done.",
                parameter="name",
                fix=f"give each loop another name; in nested loops, include the outer item: f'{name} of {{item}}'.",
            )
        return Steps(self, name, done=self._done.get(name, 0), total=total, task_name=task_name)

    def count_step(self, name: str, *, before: int, task_name: str) -> Checkpoint:
        """Return a checkpoint with one more finished step.

        Raises PayloadError if two loops use the name at the same time, or the checkpoint is too large.
        """
        if self._done.get(name, 0) != before:
            raise PayloadError(
                f"Two loops of task {task_name!r} resume {name!r} at the same time, so its steps cannot be counted.",
                parameter="name",
                fix="give each loop another name.",
            )
        _require_room(
            _document(self._value, {**self._done, name: before + 1}), self._done, task_name=task_name
        )
        self._done[name] = before + 1
        return self._next()

    def exhaust(self, name: str) -> None:
        """Mark all steps under this name as done."""
        self._exhausted.add(name)

    def _next(self, *, replaced: bytes | None = None) -> Checkpoint:
        # The number is drawn after the change and before the read, so a checkpoint with a higher number includes all lower ones.
        number = self._latest = next(self._numbers)
        return Checkpoint(number, _document(self._value, dict(self._done)), replaced)


@final
class Steps:
    """The steps of one `resume`: the number of finished steps, and their total."""

    __slots__ = ("_task_name", "_total", "_work", "done", "name")

    def __init__(self, work: PartialWork, name: str, *, done: int, total: int | None, task_name: str) -> None:
        self._work = work
        self._total = total
        self._task_name = task_name
        self.name = name
        self.done = done

    def count(self) -> Checkpoint:
        """Count one more finished step, and return the checkpoint to store."""
        checkpoint = self._work.count_step(self.name, before=self.done, task_name=self._task_name)
        self.done += 1
        return checkpoint

    def finish(self) -> None:
        """Record that there are no more steps."""
        self._work.exhaust(self.name)

    @property
    def fraction(self) -> float | None:
        """Return the fraction of finished steps, from 0 to 1, or None if the total is unknown."""
        return min(self.done / self._total, 1.0) if self._total else None

    @property
    def message(self) -> str:
        """Return the number of finished steps as text."""
        return f"{self.done} done" if self._total is None else f"{self.done} of {self._total}"


def _document(value: bytes, done: Mapping[str, int]) -> bytes:
    return msgspec.json.encode({"value": msgspec.Raw(value), "done": done})


def _require_room(document: bytes, value: object, *, task_name: str) -> None:
    if len(document) <= CHECKPOINT_LIMIT_BYTES:
        return
    raise PayloadError(
        f"The checkpoint of task {task_name!r} would take {len(document):,} bytes of JSON; "
        f"at most {CHECKPOINT_LIMIT_BYTES:,} are stored (it is of type {type(value).__qualname__}).",
        parameter="value",
        fix="store large data in files or tables, and put a reference to it into the checkpoint.",
    )


def _unstorable(misfit: Misfit, task_name: str, *, fix: str | None) -> PayloadError:
    place = f" at {misfit.path}" if misfit.path else ""
    fix = fix or (
        "checkpoint plain values (text, numbers, True, False, None, lists, dicts with str keys), such as "
        "value.isoformat() or sorted(value), and restore the value from last_checkpoint"
    )
    return PayloadError(
        f"The checkpoint of task {task_name!r}{place} {misfit.predicate}.", parameter="value", fix=f"{fix}."
    )


def share_of(stage: object, fraction: Any, *, task_name: str) -> float | None:
    """Return the fraction clamped to 0..1, or None if unknown. Raises PayloadError if `stage` or `fraction` has the wrong type."""
    if not isinstance(stage, str):
        raise PayloadError(
            f"The stage {shown(stage)} of Context.progress in task {task_name!r} is of type {type(stage).__name__}, not a text.",
            parameter="stage",
            fix="name the stage first, then the fraction: ctx.progress('resize', 0.5).",
        )
    try:
        if fraction is None or _is_nan(fraction):
            return None
        return float(min(max(fraction, 0.0), 1.0))
    except (TypeError, ValueError):
        raise PayloadError(
            f"The fraction {shown(fraction)} of Context.progress in task {task_name!r} is of type "
            f"{type(fraction).__name__}, not a number.",
            parameter="fraction",
            fix="pass a number from 0 to 1 such as n / total, or None if it is unknown.",
        ) from None


def _is_nan(fraction: Any) -> bool:
    if isinstance(fraction, bool):
        raise TypeError
    try:
        return math.isnan(fraction)
    except OverflowError:  # an int that is too large for a float
        return False


def require_items(items: object, *, name: str, task_name: str) -> None:
    """Raise PayloadError unless a `for` loop can iterate over the items in the same order in every process."""
    is_set = isinstance(items, (set, frozenset))
    if not is_set and (hasattr(type(items), "__iter__") or hasattr(type(items), "__getitem__")):
        return
    fix = "pass a list, a range or another iterable, in the same order each time"
    problem = f"are of type {type(items).__qualname__}, which is not iterable"
    if is_set:
        problem = f"are of type {type(items).__qualname__}, whose order can differ in the next process"
        fix = "pass them in a fixed order: sorted(...)"
    elif isinstance(items, AsyncIterable):
        problem = (
            f"are asynchronous (of type {type(items).__qualname__}), so a plain loop cannot iterate over them"
        )
        fix = "write 'async for ... in Context.aresume(...)' in an async task, or pass a list, a range or another iterable"
    elif type(items) is int:
        fix = f"pass range({items}) for this many steps, or a list or another iterable"
    raise PayloadError(
        f"The items {shown(items)} of the resume {name!r} in task {task_name!r} {problem}.",
        parameter="items",
        fix=f"{fix}.",
    )
