"""Schedules: the rules that send a task repeatedly, and the registry of those that an app's code declares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from hashlib import sha256
from typing import Any, Final, Literal, TypedDict, TypeVar, Unpack, cast, final

import msgspec

from everbeat.client.sender import CallSender
from everbeat.client.task import Call, Task
from everbeat.domain.schedule.model import Declared, Definition, Missed, Overlap, Rule
from everbeat.domain.schedule.options import rule_of
from everbeat.domain.schedule.timing import describe
from everbeat.domain.settings.checks import optional, public, remark, task_name
from everbeat.domain.settings.settings import (
    FieldCheck,
    StandIn,
    make_or_gather,
    place_of_caller,
    refused,
    shown,
    unknown_names,
)
from everbeat.domain.settings.units import Duration
from everbeat.errors import ConfigurationError, PayloadError, Problem, RegistrationError

TaskT = TypeVar("TaskT", bound=Task[..., Any])
BackfillOverlap = Literal["allow", "buffer_one", "buffer_all"]


class ScheduleOptions(TypedDict, total=False):
    """The options of a schedule: exactly one of `cron`, `every` and `at`, and any others. `docs/schedules.md` describes them."""

    cron: str | Sequence[str]
    every: Duration
    offset: Duration
    at: datetime | Sequence[datetime]
    timezone: str
    missed: Missed
    most: int
    catchup_window: Duration
    overlap: Overlap
    jitter: Duration
    starts: datetime | None
    ends: datetime | None
    most_runs: int | None
    pause_after_failures: int | None
    expires: Duration | None
    note: str | None


_KNOWN: Final = tuple(ScheduleOptions.__annotations__)
_OF_CALL: Final = "is an option of the call, not of the schedule"
_ELSEWHERE: Final[Mapping[str, tuple[str, str]]] = {
    **{
        name: (_OF_CALL, f"write task.with_options({name}=...).call(...)")
        for name in ("queue", "priority", "key", "timeout", "retry", "serial")
    },
    "args": (_OF_CALL, "write task.call(...)"),
    "kwargs": (_OF_CALL, "write task.call(...)"),
    "good_until": ("is a single moment, but a schedule sends many tasks", 'write expires="1h"'),
    "crontab": ("is not an option of a schedule", 'write cron="30 2 * * *"'),
    "interval": ("is not an option of a schedule", 'write every="1h"'),
    "tz": ("is not an option of a schedule", 'write timezone="Europe/Berlin"'),
    "start_date": ("is not an option of a schedule", "use starts"),
    "end_date": ("is not an option of a schedule", "use ends"),
    "misfire_grace_time": ("is not an option of a schedule", "use catchup_window"),
    "coalesce": ("is not an option of a schedule", 'use missed="latest"'),
    "max_instances": ("is not an option of a schedule", 'use overlap="skip"'),
}
"""Maps option names of calls and of other schedulers to the rule and the fix."""
_note: Final[FieldCheck] = optional(remark, none="stores no note")


@public
@final
class Schedule:
    """A rule that sends a task repeatedly, for `App.put_schedule`.

    `call` is the task with its arguments and options. Exactly one of `cron`, `every` and `at` is required. Raises ConfigurationError,
    which lists all problems, if an argument is invalid.

        app.put_schedule(Schedule("digest-42", digest.call(42), every="1h", note="asked by ann"))
    """

    __slots__ = ("_where", "call", "name", "note", "rule")

    def __init__(self, name: str, call: Call[Any], /, **options: Unpack[ScheduleOptions]) -> None:
        self._where = place_of_caller()
        self.name = name
        self.call = call
        self.rule, self.note = make_or_gather(
            lambda: _checked(name, call, options), otherwise=cast(tuple[Rule, str | None], (None, None))
        )

    def __repr__(self) -> str:
        when = "invalid" if self.rule is None else describe(self.rule.timing)
        return f"<Schedule {self.name!r} of task {getattr(self.call, 'name', None)!r}: {when}>"


def _checked(name: str, call: Call[Any], options: ScheduleOptions) -> tuple[Rule, str | None]:
    """Return the rule and the note. Raises one ConfigurationError with all problems."""
    problems: list[Problem] = []

    def gathered(check: Callable[[], Any]) -> Any:
        try:
            return check()
        except ConfigurationError as error:
            problems.extend(error.problems)

    given = {option: value for option, value in options.items() if option in _KNOWN and option != "note"}
    gathered(lambda: task_name(name, subject="name of the schedule"))
    gathered(lambda: _require_call(call))
    problems += unknown_names("Schedule", "option", _KNOWN, options, _ELSEWHERE.get)
    rule = gathered(lambda: rule_of(given, subject="Schedule"))
    note = gathered(lambda: _note(options.get("note"), subject="Schedule.note"))
    if isinstance(rule, Rule) and isinstance(call, Call) and call.settings.serial is not False:
        gathered(lambda: _require_one_line(call.settings.serial, rule.overlap))
    if problems:
        raise ConfigurationError(problems)
    return rule, note


def _require_call(call: object) -> None:
    if isinstance(call, StandIn):
        return
    if not isinstance(call, Call):
        rule = f"must be a call of a task, not of type {type(call).__name__}"
        fix = "pass task.call(...)"
        raise refused(call, subject="call of the schedule", code="WRONG_TYPE", rule=rule, fix=fix)
    if call.connection is not None:
        rule = "belongs to the transaction of a connection, but a supervisor sends the tasks of a schedule"
        fix = "leave with_options(connection=...) out"
        raise refused(call.name, subject="call of the schedule", code="CONTRADICTION", rule=rule, fix=fix)
    if call.settings.good_until is not None:
        rule = "is a single moment, but a schedule sends many tasks"
        fix = 'leave it out, and pass expires="1h" to the schedule, for example'
        given = call.settings.good_until.isoformat()
        raise refused(
            given, subject=f"good_until of task {call.name!r}", code="CONTRADICTION", rule=rule, fix=fix
        )


def _require_one_line(serial: object, overlap: Overlap) -> None:
    """Raise ConfigurationError if the runs would wait in the task's serial line and also in that of the schedule."""
    if overlap in ("buffer_one", "buffer_all"):
        rule = f"puts the runs into the schedule's serial line, but the call is in another ({serial!r}), and a task can wait in one line only"
        fix = 'use overlap="allow", or a call without serial'
        raise refused(overlap, subject="Schedule.overlap", code="CONTRADICTION", rule=rule, fix=fix)


class ScheduleRegistry:
    """The schedules that an app's code declares, by name."""

    def __init__(self, sender: CallSender) -> None:
        self._sender = sender
        self.schedules: dict[str, Schedule] = {}
        self._definitions: dict[str, Definition] = {}

    def declare(self, schedule: Schedule) -> None:
        """Register a schedule.

        Raises RegistrationError if its name is taken, and ConfigurationError if the app does not declare the queue of its call.
        """
        if schedule.rule is None or isinstance(schedule.call, StandIn):
            return  # its mistakes are gathered
        other = self.schedules.get(schedule.name)
        if other is not None:
            raise RegistrationError(
                f"Schedule {schedule.name!r} is already declared, at {other._where}.",
                fix="give one of them another name.",
                where=schedule._where,
            )
        self._definitions[schedule.name] = definition_of(schedule, self._sender)
        self.schedules[schedule.name] = schedule

    def decorator(self, name: str, options: ScheduleOptions) -> Callable[[TaskT], TaskT]:
        """Return a decorator that declares a schedule of the decorated task and returns the task."""
        where = place_of_caller()

        def decorate(task: TaskT) -> TaskT:
            if not isinstance(task, StandIn):
                make_or_gather(lambda: self._declare_task(name, task, options, where), otherwise=None)
            return task

        return decorate

    def _declare_task(
        self, name: str, task: Task[..., Any], options: ScheduleOptions, where: str | None
    ) -> None:
        if not isinstance(task, Task):
            raise RegistrationError(
                f"Schedule {name!r} decorates {shown(task)}, which is not a task.",
                fix="write @app.schedule(...) above @app.task.",
                where=where,
            )
        try:
            call = task.call()
        except PayloadError as error:
            raise RegistrationError(
                f"Schedule {name!r} sends task {task.name!r} without arguments, but the function needs some. {error.message}",
                fix=f"give the parameters defaults, or write app.schedule({name!r}, {task.name}.call(...), ...).",
                where=where,
            ) from None
        schedule = Schedule(name, call, **options)
        schedule._where = where
        self.declare(schedule)

    def declared(self, owner: str) -> Declared | None:
        """Return the declaration that workers send, or None if there are no schedules and limits. Equal declarations have equal versions."""
        limits = self._sender.limits.definitions()
        if not self._definitions and not limits:
            return None
        found = tuple(self._definitions[name] for name in sorted(self._definitions))
        # Without limits, the version is the same as in earlier versions of everbeat.
        version = sha256(msgspec.json.encode((found, limits) if limits else found)).hexdigest()
        return Declared(owner=owner, version=version, schedules=found, limits=limits)


def definition_of(schedule: Schedule, sender: CallSender) -> Definition:
    """Return the definition that is stored. Raises ConfigurationError if the app does not declare the queue of the call."""
    if not isinstance(schedule, Schedule):
        rule = f"must be a Schedule, not {type(schedule).__name__}"
        fix = 'pass Schedule("name", task.call(...), every="1h"), for example'
        raise refused(schedule, subject="schedule", code="WRONG_TYPE", rule=rule, fix=fix)
    call = sender.scheduled_call(schedule.call)
    if call.serial is not None:
        _require_one_line(call.serial, schedule.rule.overlap)
    return Definition(name=schedule.name, call=call, rule=schedule.rule, note=schedule.note)
