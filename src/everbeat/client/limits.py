"""The limits that an app declares, and the gates of the tasks that it sends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec
from msgspec import Struct
from msgspec.inspect import DecimalType, FloatType, NoneType, UnionType

from everbeat.config import QueueConfig
from everbeat.domain.limit.model import (
    MOST_LIMITS,
    NO_GATES,
    OF_QUEUE,
    OF_TASK,
    Gates,
    LimitDefinition,
    NodeGate,
    gate_of,
)
from everbeat.domain.limit.options import Limit, key_text
from everbeat.domain.settings.checks import instance_of, sequence_of
from everbeat.domain.settings.settings import make_or_gather, refused, shown
from everbeat.domain.task.definition import TaskDefinition
from everbeat.domain.typed_json import encode_json
from everbeat.domain.workflow.shapes import NoPart, Part, attribute, is_list, is_object, item, plain, shape_of
from everbeat.errors import ConfigurationError, PayloadError, Problem
from everbeat.errors.wording import nearest

if TYPE_CHECKING:
    from everbeat.client.task import Call

_ARGUMENTS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_OBJECT: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LIST: Final = msgspec.json.Decoder(list[msgspec.Raw])
_TEXT: Final = msgspec.json.Decoder(str)
_NULL: Final = "null"
_SPELLED: Final = ", but a key is a text, and equal numbers of that type have several spellings"
_NO_FLOAT: Final = "annotate it as int or str, or use another parameter"


class _TaskGate(Struct, frozen=True):
    """A limit of a registered task. `path` leads to the key in the stored arguments. `otherwise` is the key of an omitted argument."""

    limit: str
    cost: int = 1
    path: tuple[str | int, ...] = ()
    otherwise: str = _NULL


def distinct_limits(limits: Sequence[Limit]) -> tuple[Limit, ...]:
    """Return the declared limits as a tuple. Raises ConfigurationError if a limit is declared twice."""
    check = sequence_of(instance_of(Limit), longest=10_000, example="Limit('stripe', concurrency=20)")
    found: tuple[Limit, ...] = check(limits, subject="App.limits")
    names = [limit.name for limit in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        rule = f"names {', '.join(twice)} more than once"
        raise refused(names, subject="App.limits", code="DUPLICATE", rule=rule, fix="declare each limit once")
    return found


class LimitBook:
    """The limits of an app, and which of them each registered task has."""

    def __init__(self, limits: Sequence[Limit] = (), queues: Sequence[QueueConfig] = ()) -> None:
        self._limits = {limit.name: limit for limit in limits}
        self._own = {
            name: LimitDefinition(name=name, concurrency=queue.concurrency)
            for queue in queues
            if queue.concurrency is not None and (name := f"{OF_QUEUE}{queue.name}")
        }
        self._queues = {queue.name for queue in queues if queue.concurrency is not None}
        self._has_drop = any(limit.when_full == "drop" for limit in limits)
        self._tasks: dict[str, tuple[_TaskGate, ...]] = {}

    @classmethod
    def of(cls, limits: Sequence[Limit], queues: Sequence[QueueConfig]) -> Self:
        """Return the book of an app. Raises ConfigurationError, or gathers it, if a limit is declared twice."""
        return cls(make_or_gather(lambda: distinct_limits(limits), otherwise=()), queues)

    @property
    def count(self) -> int:
        """Return how many limits the code declares. The number only grows, as tasks with `concurrency` are registered."""
        return len(self._limits) + len(self._own)

    def require_valid(self, call: Call[Any]) -> None:
        """Raise ConfigurationError if the options of a call do not fit its limits. The arguments need not be known."""
        self.node_gates(call)

    def applies_to(self, call: Call[Any]) -> bool:
        """Return whether a call has limits. Raises ConfigurationError in the same cases as `gates`."""
        return self._given(call) is not None

    def definitions(self) -> tuple[LimitDefinition, ...]:
        """Return all limits that the code declares, in the order of their names."""
        found = {name: limit.definition() for name, limit in self._limits.items()} | self._own
        return tuple(found[name] for name in sorted(found))

    def definition(self, name: str) -> LimitDefinition | None:
        """Return the limit with this name, or None if the code does not declare it."""
        limit = self._limits.get(name)
        return self._own.get(name) if limit is None else limit.definition()

    def drops(self, call: Call[Any]) -> bool:
        """Return whether the send is dropped if a limit of the task is full. A task that is due later is judged when it is due."""
        return call.when is None and self._dropping(call) is not None

    def require_waiting(self, call: Call[Any], *, what: str) -> None:
        """Raise ConfigurationError if a limit of the task drops tasks, because `what` must send its tasks."""
        limit = self._dropping(call)
        if limit is not None:
            subject = f"limit {limit!r} of task {call.name!r}"
            rule = f"has when_full='drop', but {what} cannot leave out a task"
            fix = "send it with send(), or use a limit with when_full='wait'"
            raise ConfigurationError([_problem("CONTRADICTION", subject, "drop", rule, fix)])

    def _dropping(self, call: Call[Any]) -> str | None:
        if not self._has_drop:
            return None
        names = [each.limit for each in self._given(call) or ()]
        return next(
            (name for name in names if (limit := self._limits.get(name)) and limit.when_full == "drop"), None
        )

    def register(self, task: TaskDefinition) -> None:
        """Register the limits of a task. Raises ConfigurationError, which lists all problems, if they are invalid."""
        options, subject = task.options, f"limits of task {task.name!r}"
        problems = [*self._unknown(options.limits, subject=subject, where=task.where or None)]
        found: list[_TaskGate] = []
        for name in options.limits:
            limit = self._limits.get(name)
            if limit is None:
                continue
            cost = options.costs.get(name, 1)
            problems += _of_cost(limit, cost, task)
            try:
                found.append(_gate(limit, cost, task))
            except ConfigurationError as error:
                problems += error.problems
        problems += _of_costs(task)
        own = f"{OF_TASK}{task.name}"
        if options.concurrency is not None:
            if "/" in task.name:
                rule = "is not possible for a task whose name contains a slash"
                fix = f"declare Limit('NAME', concurrency={options.concurrency}), and write limits=['NAME']"
                problems.append(
                    _problem("CONTRADICTION", f"concurrency of task {task.name!r}", options.concurrency, rule, fix)
                )  # fmt: skip
            found.append(_TaskGate(own))
        concurrency = [] if options.concurrency is None else [own]
        problems += self._too_many(task.name, [*options.limits, *concurrency], options.queue)
        if problems:
            raise ConfigurationError(problems)
        if options.concurrency is not None:
            self._own[own] = LimitDefinition(name=own, concurrency=options.concurrency)
        if found:
            self._tasks[task.name] = tuple(found)

    def gates(self, call: Call[Any]) -> Gates:
        """Return the gates of a task to send.

        Raises ConfigurationError if the send names a limit that the task does not have, or has too many limits. Raises PayloadError if
        the argument that is a key is missing, or is a list or an object.
        """
        given = self._given(call)
        if given is None:
            return NO_GATES
        names = [self._name(call, each) for each in given]
        return self._priced(call.name, call.settings.queue, names, given)

    def node_gates(self, call: Call[Any]) -> tuple[tuple[NodeGate, ...], tuple[int, ...] | None]:
        """Return the gates of a workflow node's task, whose arguments are not known yet, and their costs."""
        given = self._given(call)
        if given is None:
            return (), None
        keys = call.settings.limits
        found = [
            NodeGate(gate=gate_of(each.limit, _given_key(keys, each.limit)))
            if not each.path or each.limit in keys
            else NodeGate(limit=each.limit, path=tuple(map(str, each.path)), otherwise=each.otherwise)
            for each in given
        ]
        priced = self._priced(call.name, call.settings.queue, [each.gate or "" for each in found], given)
        queued = [NodeGate(gate=name) for name in priced.names[len(found) :]]
        return (*found, *queued), priced.costs

    def _given(self, call: Call[Any]) -> tuple[_TaskGate, ...] | None:
        """Return the limits of a call, without that of its queue. Return None if neither the task nor its queue has a limit."""
        settings = call.settings
        own = self._tasks.get(call.name, ()) if call.task is not None else ()
        if not own and not settings.limits and not settings.costs and settings.queue not in self._queues:
            return None
        if call.task is None:
            problems = [*self._unknown(settings.limits, subject=f"limits of task {call.name!r}")]
            if problems and self._limits:
                raise ConfigurationError(problems)
            own = tuple(_TaskGate(name) for name in settings.limits)
        else:
            _require_known(call.name, own, settings.limits)
        _require_known(call.name, own, settings.costs, option="costs")
        if problems := [*self._of_keys(call)]:
            raise ConfigurationError(problems)
        return tuple(
            msgspec.structs.replace(each, cost=settings.costs[each.limit])
            if each.limit in settings.costs
            else each
            for each in own
        )

    def _name(self, call: Call[Any], gate: _TaskGate) -> str:
        keys = call.settings.limits
        if gate.limit in keys:
            return gate_of(gate.limit, _given_key(keys, gate.limit))
        if not gate.path:
            return gate.limit
        return gate_of(gate.limit, _key(call, gate))

    def _priced(self, task: str, queue: str, names: list[str], given: Sequence[_TaskGate]) -> Gates:
        costs = [each.cost for each in given]
        for each in given:
            limit = self._limits.get(each.limit)
            if limit is not None and (problems := [*_above(limit, each.cost, task)]):
                raise ConfigurationError(problems)
        if problems := [*self._too_many(task, [each.limit for each in given], queue)]:
            raise ConfigurationError(problems)
        if queue in self._queues:
            names.append(f"{OF_QUEUE}{queue}")
            costs.append(1)
        return Gates(tuple(names), None if set(costs) == {1} else tuple(costs))

    def _too_many(self, task: str, names: Sequence[str], queue: str) -> Iterator[Problem]:
        """Yield the problem of too many limits, with the origin of each. The limit of `concurrency` has the prefix `OF_TASK`."""
        found = [
            f"concurrency of task {task!r}" if name.startswith(OF_TASK) else f"limit {name!r}"
            for name in names
        ]
        if queue in self._queues:
            found.append(f"concurrency of queue {queue!r}")
        if len(found) > MOST_LIMITS:
            rule = f"a task can have at most {MOST_LIMITS} limits, and these are {', '.join(found)}"
            fix = f"remove {len(found) - MOST_LIMITS} of them"
            yield _problem("WRONG_COUNT", f"limits of task {task!r}", len(found), rule, fix)

    def _of_keys(self, call: Call[Any]) -> Iterator[Problem]:
        """Yield the problems of keys that the sender gives. Of a limit that this app does not declare, it is not known whether it has keys."""
        for name, key in call.settings.limits.items():
            limit = self._limits.get(name)
            if limit is None or (limit.key is None) == (key is None):
                continue
            if limit.key is None:
                rule = f"limit {name!r} has no key"
                fix, shell_fix = (
                    f"write limits={{{name!r}: None}}, or omit it",
                    f"write --limit {name}, or omit it",
                )
            else:
                rule = f"limit {name!r} needs a key"
                fix, shell_fix = (
                    f"write limits={{{name!r}: 'acme'}}, for example",
                    f"write --limit {name}=acme, for example",
                )
            problem = _problem("WRONG_KEY", f"limits[{name!r}] of task {call.name!r}", key, rule, fix)
            yield msgspec.structs.replace(problem, shell_fix=shell_fix)

    def _unknown(
        self, names: Sequence[str] | Mapping[str, Any], *, subject: str, where: str | None = None
    ) -> Iterator[Problem]:
        for name in names:
            if name not in self._limits:
                guess = nearest(name, self._limits)
                known = ", ".join(sorted(self._limits)) or "none"
                rule = f"is not one of the limits that this app declares: {known}"
                fix = (
                    f"use {guess!r}" if guess else f"add Limit({name!r}, concurrency=...) to App(limits=...)"
                )
                yield _problem("UNKNOWN_LIMIT", subject, name, rule, fix, where=where)


def _given_key(keys: Mapping[str, str | int | None], limit: str) -> str | None:
    """Return the key that the sender gives for a limit. The options have already converted numbers."""
    key = keys.get(limit)
    return None if key is None else str(key)


def _problem(
    code: str, subject: str, value: object, rule: str, fix: str, *, where: str | None = None
) -> Problem:
    return Problem(code=code, subject=subject, value=shown(value), rule=rule, fix=fix, where=where)


def _of_costs(task: TaskDefinition) -> Iterator[Problem]:
    for name in task.options.costs:
        if name not in task.options.limits:
            guess = nearest(name, task.options.limits)
            fix = f"use {guess!r}" if guess else f"add {name!r} to limits, or remove it"
            rule = "is not a limit of this task"
            yield _problem("UNKNOWN_LIMIT", f"costs of task {task.name!r}", name, rule, fix, where=task.where)


def _of_cost(limit: Limit, cost: int, task: TaskDefinition) -> Iterator[Problem]:
    return _above(limit, cost, task.name, where=task.where or None)


def _above(limit: Limit, cost: int, task: str, *, where: str | None = None) -> Iterator[Problem]:
    above = {name: most for name, most in limit.bounds.items() if cost > most}
    if above:
        bounds = " and ".join(f"{name} {most}" for name, most in above.items())
        rule = f"is more than limit {limit.name!r} ever has ({bounds}), so the task could never start"
        fix = f"use {min(above.values())} or less, or raise {' and '.join(above)} to {cost} or more"
        yield _problem("OUT_OF_RANGE", f"cost of task {task!r}", cost, rule, fix, where=where)


def _require_known(
    task: str, own: Sequence[_TaskGate], given: Mapping[str, Any], *, option: str = "limits"
) -> None:
    known = [each.limit for each in own if not each.limit.startswith(OF_TASK)]
    problems = []
    for name in given:
        if name not in known:
            guess = nearest(name, known)
            rule = f"is not a limit of this task, which has: {', '.join(known) or 'none'}"
            fix = f"use {guess!r}" if guess else f"write @app.task(limits=[{name!r}]), or omit it"
            problems.append(_problem("UNKNOWN_LIMIT", f"{option} of task {task!r}", name, rule, fix))
    if problems:
        raise ConfigurationError(problems)


def _gate(limit: Limit, cost: int, task: TaskDefinition) -> _TaskGate:
    """Return the gate of a task. Raises ConfigurationError if the key is not a parameter of the task, or not a part of one."""
    if limit.key is None:
        return _TaskGate(limit.name, cost)
    first, *rest = limit.path
    codec = task.codec
    if first not in codec.parameters:
        guess = nearest(first, codec.parameters)
        takes = ", ".join(codec.parameters) or "none"
        rule = f"is not a parameter of task {task.name!r}, which takes: {takes}"
        fix = f"use key={'.'.join([guess, *rest])!r}" if guess else "use the name of a parameter"
        raise _wrong_key(limit, rule, fix, task)
    shape = shape_of(codec.annotations[first])
    path: list[str | int] = [first]
    for name in rest:
        try:
            part = _part(shape, name)
        except NoPart as error:
            rule = f"is not a part of parameter {first!r} of task {task.name!r}: {error.reason}"
            choices = ", ".join(error.choices[:10])
            fix = f"use one of {choices}" if choices else "use the name of a field"
            raise _wrong_key(limit, rule, fix, task) from None
        path.append(part.step)
        shape = part.shape
    if _is_compound(shape):
        rule = f"is a list or an object in task {task.name!r}, but a key is a text or a number"
        raise _wrong_key(
            limit, rule, f"use a part of it, such as key='{limit.key}.id', or another parameter", task
        )
    if _has_fraction(shape):
        raise _wrong_key(
            limit, f"can be a float or a Decimal in task {task.name!r}{_SPELLED}", _NO_FLOAT, task
        )
    return _TaskGate(limit.name, cost, tuple(path), _default(limit, task, path))


def _is_compound(shape: Any) -> bool:
    """Return whether each value of this shape, except None, is a list or an object."""
    if isinstance(shape, UnionType):
        return all(_is_compound(each) for each in shape.types if not isinstance(each, NoneType))
    return is_list(plain(shape)) or is_object(plain(shape))


def _has_fraction(shape: Any) -> bool:
    """Return whether a value of this shape can be a float or a Decimal."""
    if isinstance(shape, UnionType):
        return any(map(_has_fraction, shape.types))
    return isinstance(plain(shape), FloatType | DecimalType)


def _part(shape: Any, name: str) -> Part:
    try:
        return attribute(shape, name)
    except NoPart as error:
        try:
            return item(shape, int(name) if name.isdigit() else name)
        except NoPart:
            raise error from None


def _wrong_key(limit: Limit, rule: str, fix: str, task: TaskDefinition) -> ConfigurationError:
    subject = f"key of limit {limit.name!r}"
    return ConfigurationError(
        [_problem("UNKNOWN_PARAMETER", subject, limit.key, rule, fix, where=task.where or None)]
    )


def _default(limit: Limit, task: TaskDefinition, path: Sequence[str | int]) -> str:
    """Return the key of a call that omits the parameter: the default, or the part of it. Raises ConfigurationError if that is a float."""
    first, *rest = path
    try:
        raw = _part_of(encode_json(task.codec.default_of(str(first))), rest)
        text = _scalar(raw)
    except Exception:  # noqa: BLE001 - defaults are user code, and JSON need not represent them
        return _NULL
    if _is_fraction(raw):
        raise _wrong_key(
            limit, f"has a float as its default in task {task.name!r}{_SPELLED}", _NO_FLOAT, task
        )
    return _NULL if text is None else key_text(text, subject=f"default of {first!r} in task {task.name!r}")


def _part_of(raw: bytes, path: Sequence[str | int]) -> bytes:
    """Return the part of a JSON value at a path. A part of null is null."""
    for step in path:
        if raw == _NULL.encode():
            break
        raw = bytes(_LIST.decode(raw)[step] if isinstance(step, int) else _OBJECT.decode(raw)[step])
    return raw


def _is_fraction(raw: bytes) -> bool:
    """Return whether a JSON value is a number with a fraction or an exponent."""
    return raw[:1] in b"-0123456789" and any(each in b".eE" for each in raw)


def _scalar(raw: bytes) -> str | None:
    """Return a JSON value as the text of a key, or None if it is a list or an object."""
    if raw[:1] in b"[{":
        return None
    return _TEXT.decode(raw) if raw[:1] == b'"' else raw.decode()


def _key(call: Call[Any], gate: _TaskGate) -> str:
    """Return the text of the key in the arguments of a call."""
    first, *rest = gate.path
    found = _ARGUMENTS.decode(call.payload).get(str(first))
    if found is None:
        return gate.otherwise
    try:
        value = _part_of(bytes(found), rest)
    except (msgspec.MsgspecError, KeyError, IndexError):
        raise _unusable(call, gate, "has no such part") from None
    if _is_fraction(value):
        raise _unusable(call, gate, "is a float, and equal floats have several spellings")
    text = _scalar(value)
    if text is None:
        raise _unusable(call, gate, "is a list or an object")
    try:
        return key_text(text, subject="key")
    except ConfigurationError as error:
        raise _unusable(call, gate, error.problems[0].rule) from None


def _unusable(call: Call[Any], gate: _TaskGate, rule: str) -> PayloadError:
    path = ".".join(map(str, gate.path))
    return PayloadError(
        f"The key {path!r} of limit {gate.limit!r} {rule} in the arguments of task {call.name!r}.",
        parameter=str(gate.path[0]),
        fix=f"pass a text or a number there, or give the key: with_options(limits={{{gate.limit!r}: ...}}).",
    )
