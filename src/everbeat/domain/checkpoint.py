"""What a task has finished of its work: the value of its last checkpoint and how many steps of each `resume` are done.

What lives here: `PartialWork`, its limits and its JSON. What may not: who stores it, and the loops themselves (`context`).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import Any, Final, final

import msgspec
from msgspec import Struct

from everbeat.domain.fidelity import Misfit
from everbeat.domain.settings import shown
from everbeat.domain.typed_json import encode_untyped, require_plain
from everbeat.errors import PayloadError

CHECKPOINT_LIMIT_BYTES: Final = 1_048_576
"""The largest checkpoint, as JSON and with the counts of all resumes: it is written again at every step."""
NAME_LIMIT: Final = 200

_NOTHING: Final = b"null"


class _Stored(msgspec.Struct):
    value: msgspec.Raw = msgspec.Raw(_NOTHING)
    done: dict[str, int] = {}


_stored = msgspec.json.Decoder(_Stored)


class Checkpoint(Struct, frozen=True):
    """All that is finished, as JSON; one with a higher `number` holds everything that one with a lower number does.

    `replaced`: the value before, where this one brings another.
    """

    number: int
    data: bytes
    replaced: bytes | None = None


@final
class PartialWork:
    """What is finished of one task, growing while an attempt runs; safe to use from several threads."""

    __slots__ = ("_done", "_exhausted", "_latest", "_numbers", "_value")

    def __init__(self, *, value: bytes = _NOTHING, done: Mapping[str, int] | None = None) -> None:
        self._value = value
        self._done = dict(done or {})
        self._exhausted: set[str] = set()
        self._numbers = count(1)
        self._latest = 0

    @classmethod
    def from_json(cls, data: bytes | str | None) -> PartialWork:
        """What earlier attempts stored; nothing where there is nothing, or what somebody wrote by hand cannot be read."""
        if data is None:
            return cls()
        try:
            stored = _stored.decode(data)
        except (msgspec.MsgspecError, UnicodeError):
            stored = _Stored()
        return cls(value=bytes(stored.value), done={name: max(0, n) for name, n in stored.done.items()})

    @property
    def last(self) -> Any:
        """The value of the last checkpoint as plain JSON, each time a fresh copy; None before the first."""
        return msgspec.json.decode(self._value)

    def checkpoint(self, value: object, *, task_name: str) -> Checkpoint:
        """The next checkpoint, with another value. Raises PayloadError, and then nothing has changed."""
        try:
            data = encode_untyped(value)
        except Misfit as misfit:
            raise _unstorable(misfit, task_name, fix=misfit.fix) from None
        _require_room(_document(data, self._done), value, task_name=task_name)
        try:
            require_plain(value, data)
        except Misfit as misfit:  # its own fix speaks of annotations, and a checkpoint has none
            raise _unstorable(misfit, task_name, fix=None) from None
        replaced, self._value = self._value, data
        return self._next(replaced=replaced)

    def take_back(self, checkpoint: Checkpoint) -> None:
        """It was refused: the value before is the last one, unless another came after. Steps that are done remain done."""
        if checkpoint.replaced is not None and self._latest == checkpoint.number:
            self._value = checkpoint.replaced

    def steps(self, name: str, *, total: int | None, task_name: str) -> Steps:
        """The steps of one `resume`. Raises PayloadError for a name that cannot be counted under."""
        if not isinstance(name, str) or not 1 <= len(name) <= NAME_LIMIT or not name.isprintable():
            raise PayloadError(
                f"The name {shown(name)} of a resume in task {task_name!r} is not a printable text of 1 to {NAME_LIMIT} characters.",
                parameter="name",
                fix="name the steps by a short text such as 'frame'.",
            )
        if name in self._exhausted:
            raise PayloadError(
                f"Task {task_name!r} resumes {name!r} again in the same attempt, where all its steps are done already.",
                parameter="name",
                fix=f"give each loop a name of its own, in nested loops with the outer item in it: f'{name} of {{item}}'.",
            )
        return Steps(self, name, done=self._done.get(name, 0), total=total, task_name=task_name)

    def count_step(self, name: str, *, before: int, task_name: str) -> Checkpoint:
        """The checkpoint that says one more step of this name is done. Raises PayloadError."""
        if self._done.get(name, 0) != before:
            raise PayloadError(
                f"Two loops of task {task_name!r} resume {name!r} at the same time, so its steps cannot be counted.",
                parameter="name",
                fix="give each loop a name of its own.",
            )
        _require_room(
            _document(self._value, {**self._done, name: before + 1}), self._done, task_name=task_name
        )
        self._done[name] = before + 1
        return self._next()

    def exhaust(self, name: str) -> None:
        """All steps of this name are done."""
        self._exhausted.add(name)

    def _next(self, *, replaced: bytes | None = None) -> Checkpoint:
        # The number is drawn after the change and before the reading: a higher one has seen what a lower one has.
        number = self._latest = next(self._numbers)
        return Checkpoint(number, _document(self._value, dict(self._done)), replaced)


@final
class Steps:
    """The steps of one `resume`: how many are done, and of how many."""

    __slots__ = ("_task_name", "_total", "_work", "done", "name")

    def __init__(self, work: PartialWork, name: str, *, done: int, total: int | None, task_name: str) -> None:
        self._work = work
        self._total = total
        self._task_name = task_name
        self.name = name
        self.done = done

    def count(self) -> Checkpoint:
        """One more is done."""
        checkpoint = self._work.count_step(self.name, before=self.done, task_name=self._task_name)
        self.done += 1
        return checkpoint

    def finish(self) -> None:
        """There are no more."""
        self._work.exhaust(self.name)

    @property
    def fraction(self) -> float | None:
        """How much is done, 0 to 1; None where the number of steps is not known."""
        return min(self.done / self._total, 1.0) if self._total else None

    @property
    def message(self) -> str:
        """How much is done, in words."""
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
        fix="keep large data in files or tables of your own, and say in the checkpoint where it is.",
    )


def _unstorable(misfit: Misfit, task_name: str, *, fix: str | None) -> PayloadError:
    starts_well = misfit.reason.startswith(("is ", "has ", "holds ", "would take "))
    reason = misfit.reason if starts_well else f"cannot be JSON: {misfit.reason}"
    place = f" at {misfit.path}" if misfit.path else ""
    fix = fix or (
        "checkpoint plain values (text, numbers, True, False, None, lists of them, dicts with str keys), such as "
        "value.isoformat() or sorted(value), and make the value of them again from last_checkpoint"
    )
    return PayloadError(
        f"The checkpoint of task {task_name!r}{place} {reason}.", parameter="value", fix=f"{fix}."
    )
