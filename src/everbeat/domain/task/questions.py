"""Questions of tasks to people: what a question looks like while it waits, and which answers fit it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Literal, TypeAlias
from uuid import UUID

import msgspec
from msgspec import Struct
from msgspec import inspect as types

from everbeat.domain.task.steps import ANSWER_PREFIX, require_carried
from everbeat.domain.typed_json import Misfit, encode_untyped, require_plain
from everbeat.errors import PayloadError
from everbeat.errors.wording import amount, is_storable

TEXT_LIMIT: Final = 2_000
"""The maximum number of characters of a question, and of its note."""
MOST_CHOICES: Final = 100

AnswerKind: TypeAlias = Literal["bool", "int", "float", "str", "list", "object", "any"]
_KINDS: Final[Mapping[type[types.Type], AnswerKind]] = {
    types.BoolType: "bool",
    types.IntType: "int",
    types.FloatType: "float",
    types.AnyType: "any",
    types.RawType: "any",
    types.ListType: "list",
    types.SetType: "list",
    types.FrozenSetType: "list",
    types.TupleType: "list",
    types.VarTupleType: "list",
    types.NamedTupleType: "list",
    types.DictType: "object",
    types.TypedDictType: "object",
    types.DataclassType: "object",
    types.CustomType: "any",
    types.StrType: "str",
    types.DateTimeType: "str",
    types.DateType: "str",
    types.TimeType: "str",
    types.TimeDeltaType: "str",
    types.UUIDType: "str",
    types.DecimalType: "str",
    types.BytesType: "str",
}
_TESTS: Final[Mapping[AnswerKind, Callable[[object], bool]]] = {
    "bool": lambda value: isinstance(value, bool),
    "int": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "float": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "str": lambda value: isinstance(value, str),
    "list": lambda value: isinstance(value, list | tuple),
    "object": lambda value: isinstance(value, Mapping),
    "any": lambda _: True,
}
_WORDS: Final[Mapping[AnswerKind, str]] = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "list": "a list",
    "object": "an object",
    "any": "any JSON value",
}
_YES_OR_NO: Final = {"true": True, "yes": True, "y": True, "false": False, "no": False, "n": False}


class AnswerType(Struct, frozen=True):
    """The type of an answer: a kind of JSON value or, if there are `choices`, one of them. `nullable`: null is an answer too."""

    kind: AnswerKind = "any"
    choices: tuple[Any, ...] | None = None
    nullable: bool = False

    def __str__(self) -> str:
        words = _WORDS[self.kind] if self.choices is None else " or ".join(map(_json, self.choices))
        return f"{words} or null" if self.nullable else words

    def accepts(self, value: object) -> bool:
        """Return whether the value is an answer of this type."""
        if value is None and (self.nullable or self.kind == "any"):
            return self.choices is None or self.nullable
        if self.choices is not None:
            return any(
                each == value and isinstance(each, bool) is isinstance(value, bool) for each in self.choices
            )
        return _TESTS[self.kind](value)

    def read(self, text: str) -> object:
        """Return the answer that a person has typed. Raises PayloadError if it is not of this type.

        A text needs no quotes. For `true` and `false`, `yes` and `no` are accepted too.
        """
        for value in self._readings(text):
            if self.accepts(value):
                return value
        raise _unfit(text, self)

    def _readings(self, text: str) -> Sequence[object]:
        readings: list[object] = []
        if self.kind == "bool" and text.lower() in _YES_OR_NO:
            readings.append(_YES_OR_NO[text.lower()])
        plain_first = self.kind == "str"
        try:
            decoded: list[object] = [msgspec.json.decode(text)]
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            decoded = []
        return [*readings, *([text, *decoded] if plain_first else [*decoded, text])]


class StoredQuestion(Struct, frozen=True):
    """A question as the wait's row stores it, in JSON."""

    question: str
    type: AnswerType = AnswerType()
    note: str | None = None


class StoredAnswer(Struct, frozen=True):
    """An answer as its signal stores it, in JSON. The question is kept with it."""

    answer: msgspec.Raw
    by: str | None = None
    question: str | None = None


class OpenQuestion(Struct, frozen=True, kw_only=True):
    """A question that waits for an answer.

    `step` identifies it in its task. `question`, `type` and `note` are what the task's code has asked. The task asked at `since`, and waits
    until `until`, or for ever if it is None. `labels` are those of the task.
    """

    task_id: UUID
    name: str
    queue: str
    step: str
    question: str
    type: AnswerType
    note: str | None
    since: datetime
    until: datetime | None
    labels: Mapping[str, str] = {}


def is_answer(event: str | None) -> bool:
    """Return whether the event is the answer to a question."""
    return event is not None and event.startswith(ANSWER_PREFIX)


def step_of(event: str) -> str:
    """Return the step whose question the event answers."""
    return event.removeprefix(ANSWER_PREFIX)


def stored_question(text: str | None) -> StoredQuestion:
    """Parse a stored question. An unreadable one, which can only come from a manual edit, has its beginning as the question."""
    try:
        return msgspec.json.decode(text or "", type=StoredQuestion)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return StoredQuestion((text or "")[:TEXT_LIMIT])


def described(
    question: object, annotation: Any, *, choices: Sequence[Any] | None, note: object, task_name: str
) -> StoredQuestion:
    """Return a question to store. Raises PayloadError if its text, type, choices or note are invalid."""
    for value, name, what in ((question, "question", "text"), (note, "note", "note")):
        if not (name == "note" and value is None) and not (
            isinstance(value, str) and 0 < len(value) <= TEXT_LIMIT and is_storable(value)
        ):
            raise PayloadError(
                f"The {what} of a question of task {task_name!r} is not a text of 1 to {TEXT_LIMIT:,} characters without NUL and lone surrogates.",
                parameter=name,
                fix="ask a short question, such as 'Refund 300 EUR to Ann?'.",
            )
    require_carried(annotation, event="answer", task_name=task_name)
    kind = type_of(annotation)
    if choices is not None:
        kind = AnswerType(kind.kind, _checked_choices(choices, kind, task_name=task_name), kind.nullable)
    return StoredQuestion(str(question), kind, None if note is None else str(note))


def type_of(annotation: Any) -> AnswerType:
    """Return what an answer with this annotation looks like in JSON. A type that has no simple description accepts any value."""
    return _type_of(types.type_info(annotation))


def _type_of(described_type: types.Type) -> AnswerType:
    match described_type:
        case types.Metadata(type=inner):
            return _type_of(inner)
        case types.LiteralType(values=values):
            return AnswerType(_kind_of(values), tuple(values))
        case types.EnumType(cls=cls):
            values = tuple(each.value for each in cls)
            return AnswerType(_kind_of(values), values)
        case types.NoneType():
            return AnswerType("any", (None,), nullable=True)
        case types.UnionType(types=several):
            others = [each for each in several if not isinstance(each, types.NoneType)]
            found = _type_of(others[0]) if len(others) == 1 else AnswerType()
            return AnswerType(
                found.kind, found.choices, nullable=len(others) < len(several) or found.nullable
            )
        case types.StructType(array_like=is_array):
            return AnswerType("list" if is_array else "object")
        case _:
            return AnswerType(_KINDS.get(type(described_type), "any"))


def _kind_of(values: Sequence[Any]) -> AnswerKind:
    if all(isinstance(each, str) for each in values):
        return "str"
    return "int" if all(_TESTS["int"](each) for each in values) else "any"


def _checked_choices(choices: Sequence[Any], kind: AnswerType, *, task_name: str) -> tuple[Any, ...]:
    chosen = tuple(choices) if isinstance(choices, list | tuple) else ()
    if not 1 <= len(chosen) <= MOST_CHOICES:
        raise PayloadError(
            f"The choices of a question of task {task_name!r} are not a list of 1 to {MOST_CHOICES} values.",
            parameter="choices",
            fix="pass a list such as ['refund', 'replace'].",
        )
    for each in chosen:
        try:
            require_plain(each, encode_untyped(each))
        except Misfit as misfit:
            raise PayloadError(
                f"A choice of a question of task {task_name!r} {misfit.predicate}.",
                parameter="choices",
                fix="use texts or numbers.",
            ) from None
        if not kind.accepts(each):
            raise PayloadError(
                f"The choice {_json(each)} of a question of task {task_name!r} is not {kind}, which its type requires.",
                parameter="choices",
                fix="pass choices of the type, or another type.",
            )
    return chosen


def require_fit(value: object, asked: AnswerType) -> None:
    """Raise PayloadError unless the value is an answer of this type."""
    if not asked.accepts(value):
        raise _unfit(value, asked)


def _unfit(value: object, asked: AnswerType) -> PayloadError:
    return PayloadError(
        f"The answer {_json(value)} does not fit: the question asks for {asked}.",
        parameter="value",
        fix="answer with such a value; 'everbeat inbox' lists the questions.",
    )


def several_questions(task_id: UUID, steps: Sequence[str]) -> PayloadError:
    """Return the error for an answer that does not say which of several open questions it answers."""
    return PayloadError(
        f"Task {task_id} waits for answers to {amount(len(steps), 'question')}, in the steps {', '.join(steps)}.",
        parameter="step",
        fix=f"name the step of the question, such as {steps[0]!r}.",
    )


def _json(value: object) -> str:
    try:
        text = msgspec.json.encode(value).decode()
    except Exception:  # noqa: BLE001 - the value of a user's class may break anything
        text = type(value).__name__
    return text if len(text) <= 80 else f"{text[:77]}..."
