"""The `App` methods for schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta
from functools import partial
from itertools import islice, takewhile
from types import MappingProxyType
from typing import Any, Final, Unpack, overload
from uuid import UUID

from everbeat.client.database_access import DatabaseMethods
from everbeat.client.handle import Handle, TaskOperations
from everbeat.client.registry import Registry
from everbeat.client.schedules import (
    BackfillOverlap,
    Schedule,
    ScheduleOptions,
    ScheduleRegistry,
    TaskT,
    definition_of,
)
from everbeat.client.sender import CallSender
from everbeat.client.task import Call
from everbeat.client.traced_sends import traced_run
from everbeat.domain.explain.schedules import ScheduleExplanation
from everbeat.domain.schedule.inspection import ScheduleFilters, ScheduleInfo, ScheduleState, TickInfo
from everbeat.domain.schedule.model import DecidedTick, Definition, Rule
from everbeat.domain.schedule.ticks import due_at, rule_ticks, tick_task_id
from everbeat.domain.schedule.timing import zone_is_known
from everbeat.domain.settings.checks import (
    one_of,
    remark,
    reporting_wrong_calls,
    sought_or_none,
    switch,
    task_name,
    whole,
)
from everbeat.domain.settings.settings import make_or_gather, refused
from everbeat.domain.settings.units import Until, When, to_future, to_past_moment, to_until
from everbeat.errors import NotPaused, ScheduleNotChanged, SendError, UnknownName
from everbeat.store import schedules
from everbeat.store.inspection import read_clock
from everbeat.store.plan import Plan, ask
from everbeat.store.steps import installation
from everbeat.store.tasks import KEY_TRIES

_limit: Final = whole(1, 100_000)
_few: Final = whole(1, 1_000)
_overlap: Final = one_of("allow", "buffer_one", "buffer_all")
_state: Final = one_of("ACTIVE", "PAUSED", "RETIRED", "ENDED")
_INSTANT: Final = timedelta(microseconds=1)
_MOST_BACKFILLED: Final = 10_000
_BACKFILLED_AT_ONCE: Final = 1_000


class ScheduleMethods(DatabaseMethods):
    """The `App` methods for schedules."""

    _operations: TaskOperations
    _registry: Registry
    _schedules: ScheduleRegistry
    _sender: CallSender

    @property
    def schedules(self) -> Mapping[str, Schedule]:
        """Return a mapping from the names of the schedules that the code declares to the schedules."""
        return MappingProxyType(self._schedules.schedules)

    @overload
    def schedule(self, name: str, call: Call[Any], /, **options: Unpack[ScheduleOptions]) -> Schedule: ...
    @overload
    def schedule(self, name: str, /, **options: Unpack[ScheduleOptions]) -> Callable[[TaskT], TaskT]: ...
    def schedule(
        self, name: str, call: Call[Any] | None = None, /, **options: Unpack[ScheduleOptions]
    ) -> Any:
        """Declare a schedule in code. Use this method as a decorator above `@app.task`, or pass a call.

        Workers store the declared schedules when they start. Exactly one of `cron`, `every` and `at` is required. Raises
        ConfigurationError, which lists all problems, if an option is invalid. Raises RegistrationError if the name is taken, or if a
        decorated task needs arguments.

            @app.schedule("nightly-report", cron="30 2 * * *", timezone="Europe/Berlin", overlap="skip")
            @app.task(on_crash="retry")
            def report(ctx: Context, kind: str = "sales") -> None: ...

            app.schedule("hourly-costs", report.call("costs"), every="1h")
        """
        if call is None:
            return self._schedules.decorator(name, options)
        made = Schedule(name, call, **options)
        make_or_gather(lambda: self._schedules.declare(made), otherwise=None)
        return made

    def put_schedule(self, schedule: Schedule, /) -> ScheduleInfo:
        """Store a schedule, or replace the schedule with the same name. Return the stored schedule.

        If the timing is unchanged, a replaced schedule keeps its undecided ticks. Otherwise, it begins anew. Raises ScheduleNotChanged if
        code declares a schedule with this name.

            app.put_schedule(Schedule("digest-42", digest.call(42), every="1h", note="asked by ann"))
        """
        return self._run("put_schedule", self._sender.declarations.before(self._put(schedule), None))

    async def aput_schedule(self, schedule: Schedule, /) -> ScheduleInfo:
        """Async version of `put_schedule` that does not block the running event loop."""
        return await self._arun(self._sender.declarations.before(self._put(schedule), None))

    def list_schedules(
        self, *, after: str | None = None, limit: int = 1_000, **filters: Unpack[ScheduleFilters]
    ) -> list[ScheduleInfo]:
        """Return the schedules that match all the given filters (see `ScheduleFilters`), in the order of their names.

        To get the next page, pass the last name of the previous page as `after`. Raises ConfigurationError if a filter is invalid.

        app.list_schedules(state="PAUSED", prefix="digest-")
        """
        return self._run("list_schedules", _listed(after=after, limit=limit, **filters))

    async def alist_schedules(
        self, *, after: str | None = None, limit: int = 1_000, **filters: Unpack[ScheduleFilters]
    ) -> list[ScheduleInfo]:
        """Async version of `list_schedules` that does not block the running event loop."""
        return await self._arun(_listed(after=after, limit=limit, **filters))

    def schedule_info(self, name: str, /) -> ScheduleInfo:
        """Return a schedule. Raises UnknownName if it does not exist."""
        return self._run("schedule_info", _info(name))

    async def aschedule_info(self, name: str, /) -> ScheduleInfo:
        """Async version of `schedule_info` that does not block the running event loop."""
        return await self._arun(_info(name))

    def next_ticks(self, name: str, n: int = 5, /) -> list[datetime]:
        """Return the next `n` ticks of a schedule, without jitter, in UTC.

        The ticks of a paused schedule begin after the end of its pause, or after now if the pause has no end. The list is shorter if the
        schedule ends earlier, and empty if it has ended or is retired. Raises UnknownName if the schedule does not exist.

        app.next_ticks("digest-42", 5)
        """
        return self._run("next_ticks", _next(name, n))

    async def anext_ticks(self, name: str, n: int = 5, /) -> list[datetime]:
        """Async version of `next_ticks` that does not block the running event loop."""
        return await self._arun(_next(name, n))

    def list_ticks(self, name: str, /, *, before: datetime | None = None, limit: int = 100) -> list[TickInfo]:
        """Return the decided ticks of a schedule, latest first. Each has its outcome, and the reason if no task was sent.

        To get the next page, pass the last tick of the previous page as `before`. Raises UnknownName if the schedule does not exist.
        """
        return self._run("list_ticks", _ticks(name, before, limit))

    async def alist_ticks(
        self, name: str, /, *, before: datetime | None = None, limit: int = 100
    ) -> list[TickInfo]:
        """Async version of `list_ticks` that does not block the running event loop."""
        return await self._arun(_ticks(name, before, limit))

    def explain_schedule(self, name: str, /) -> ScheduleExplanation:
        """Return why a schedule sends no tasks, or when it sends the next one, and why earlier ticks were not sent.

        Raises UnknownName if the schedule does not exist.

        app.explain_schedule("digest-42").reasons[0].text
        """
        return self._run("explain_schedule", self._explained(name))

    async def aexplain_schedule(self, name: str, /) -> ScheduleExplanation:
        """Async version of `explain_schedule` that does not block the running event loop."""
        return await self._arun(self._explained(name))

    def pause_schedule(
        self, name: str, /, *, reason: str | None = None, until: Until | None = None
    ) -> ScheduleInfo:
        """Stop a schedule from sending tasks until it is resumed, or until `until`. Runs that were sent before continue.

        `until` is a datetime with a time zone, or a duration from now. The ticks during the pause are recorded as
        missed. If the schedule is already paused, returns it unchanged. Raises UnknownName if the schedule does not exist, and
        ConfigurationError if `until` is not in the future.

            app.pause_schedule("digest-42", reason="the mail server is being replaced")
        """
        return self._run("pause_schedule", _pause(name, reason, until))

    async def apause_schedule(
        self, name: str, /, *, reason: str | None = None, until: Until | None = None
    ) -> ScheduleInfo:
        """Async version of `pause_schedule` that does not block the running event loop."""
        return await self._arun(_pause(name, reason, until))

    def resume_schedule(self, name: str, /) -> ScheduleInfo:
        """End the pause of a schedule. The next tick is sent.

        Raises NotPaused if the schedule is not paused, and UnknownName if it does not exist.
        """
        return self._run("resume_schedule", _resume(name))

    async def aresume_schedule(self, name: str, /) -> ScheduleInfo:
        """Async version of `resume_schedule` that does not block the running event loop."""
        return await self._arun(_resume(name))

    def run_schedule(self, name: str, /) -> Handle[Any]:
        """Send the task of a schedule now, outside its ticks, and return its handle, even if the schedule is paused or has ended.

        `ctx.tick` is None in this run. If a live task has the key of the run, return the handle of that task. Raises
        UnknownName if the schedule does not exist.
        """
        return self._run("run_schedule", self._run_now(name))

    async def arun_schedule(self, name: str, /) -> Handle[Any]:
        """Async version of `run_schedule` that does not block the running event loop."""
        return await self._arun(self._run_now(name))

    def delete_schedule(self, name: str, /) -> None:
        """Delete a schedule that was made at run time, or a retired one. Its runs and ticks remain until they are pruned.

        Raises ScheduleNotChanged if code declares the schedule, and UnknownName if it does not exist.
        """
        self._run("delete_schedule", _delete(name))

    async def adelete_schedule(self, name: str, /) -> None:
        """Async version of `delete_schedule` that does not block the running event loop."""
        await self._arun(_delete(name))

    def backfill(
        self,
        name: str,
        /,
        *,
        since: datetime,
        until: datetime,
        overlap: BackfillOverlap = "buffer_all",
        dry_run: bool = False,
    ) -> list[datetime]:
        """Send a run for each tick from `since` until before `until` that has no run yet. Return the sent ticks, in order.

        With `overlap="buffer_all"` or "buffer_one", the runs start one at a time, in order. With "allow", all can start at once. Ticks in
        the future are left out, and ticks whose key a live task has. If `dry_run` is set, only return the ticks without a run. Raises
        UnknownName if the schedule does not exist, and ConfigurationError if the range is empty or contains more than 10,000 ticks.

            app.backfill("nightly-report", since=monday, until=friday, dry_run=True)
        """
        plan = self._backfill(name, since=since, until=until, overlap=overlap, dry_run=dry_run)
        return self._run("backfill", plan)

    async def abackfill(
        self,
        name: str,
        /,
        *,
        since: datetime,
        until: datetime,
        overlap: BackfillOverlap = "buffer_all",
        dry_run: bool = False,
    ) -> list[datetime]:
        """Async version of `backfill` that does not block the running event loop."""
        return await self._arun(
            self._backfill(name, since=since, until=until, overlap=overlap, dry_run=dry_run)
        )

    def _explained(self, name: str) -> Plan[ScheduleExplanation]:
        return self._operations.explain_schedule(_name(name, subject="explain_schedule.name"))

    def _put(self, schedule: Schedule) -> Plan[ScheduleInfo]:
        return _stored(definition_of(schedule, self._sender))

    def _run_now(self, name: str) -> Plan[Handle[Any]]:
        return self._sent_now(_name(name, subject="run_schedule.name"))

    def _sent_now(self, name: str) -> Plan[Handle[Any]]:
        found = yield from _known(name)
        new = self._sender.ids.next()
        return (yield from traced_run(self._sender.tracing, found, new, partial(self._sent_as, new, found)))

    def _sent_as(self, new: UUID, found: ScheduleInfo, context: str | None) -> Plan[Handle[Any]]:
        name, channel = found.name, self._database.channel
        for _ in range(KEY_TRIES):
            sent = yield from ask(schedules.run_schedule(name, task_id=new, channel=channel, context=context))
            if sent is None:
                raise UnknownName("schedule", [name], known=(yield from ask(schedules.known_schedules())))
            if sent.task_id is not None:
                task = self._registry.task(found.task)
                if task is None:
                    return Handle(sent.task_id, name=found.task, operations=self._operations)
                decode: Callable[[str], Any] = task._definition.codec.decode_result
                return Handle(sent.task_id, name=found.task, operations=self._operations, decode=decode)
        raise SendError(
            f"The key of schedule {name!r} was taken and released again during each of {KEY_TRIES} tries to send.",
            task_id=new,
            fix="run it again; nothing was stored for it.",
        )

    def _backfill(
        self, name: str, *, since: datetime, until: datetime, overlap: BackfillOverlap, dry_run: bool
    ) -> Plan[list[datetime]]:
        _name(name, subject="backfill.name")
        first, end = (
            to_past_moment(since, subject="backfill.since"),
            to_past_moment(until, subject="backfill.until"),
        )
        if first >= end:
            rule = f"must be before until ({end.isoformat()})"
            fix = "pass an earlier since, or a later until"
            raise refused(
                first.isoformat(), subject="backfill.since", code="CONTRADICTION", rule=rule, fix=fix
            )
        is_serial = _overlap(overlap, subject="backfill.overlap") != "allow"
        is_dry = switch(dry_run, subject="backfill.dry_run")
        return self._backfilled(name, first, end, is_serial=is_serial, is_dry=is_dry)

    def _backfilled(
        self, name: str, since: datetime, until: datetime, *, is_serial: bool, is_dry: bool
    ) -> Plan[list[datetime]]:
        found = yield from _known(name)
        ticks = _ticks_between(found, since, until)
        sent = yield from ask(schedules.list_sent_ticks(name, since=since, until=until))
        missing = [tick for tick in ticks if tick not in sent]
        if is_dry or not missing:
            return missing
        known = str((yield from ask(installation())))
        for start in range(0, len(missing), _BACKFILLED_AT_ONCE):
            decided = [
                DecidedTick(
                    at=tick, outcome="SENT", task_id=tick_task_id(known, name, tick), is_serial=is_serial
                )
                for tick in missing[start : start + _BACKFILLED_AT_ONCE]
            ]
            channel = self._database.channel
            if (yield from ask(schedules.backfill_ticks(name, decided, channel=channel))) is None:
                raise UnknownName("schedule", [name])
        sent = yield from ask(schedules.list_sent_ticks(name, since=since, until=until))
        return [tick for tick in missing if tick in sent]


def _name(given: str, *, subject: str) -> str:
    checked: str = task_name(given, subject=subject)
    return checked


def _known(name: str) -> Plan[ScheduleInfo]:
    """Return the schedule. Raises UnknownName if it does not exist."""
    found = yield from ask(schedules.read_schedule(name))
    if found is None:
        raise UnknownName("schedule", [name], known=(yield from ask(schedules.known_schedules())))
    return found


def _stored(definition: Definition) -> Plan[ScheduleInfo]:
    reply = yield from ask(schedules.put_schedule(definition))
    if reply.verdict == "declared":
        raise ScheduleNotChanged(definition.name, owner=reply.owner or "")
    return (yield from _known(definition.name))


@reporting_wrong_calls("App.list_schedules")
def _listed(
    *,
    state: ScheduleState | None = None,
    task: str | None = None,
    owner: str | None = None,
    prefix: str | None = None,
    after: str | None,
    limit: int,
) -> Plan[list[ScheduleInfo]]:
    return ask(
        schedules.list_schedules(
            state=None if state is None else _state(state, subject="list_schedules.state"),
            task=sought_or_none(task, subject="list_schedules.task"),
            owner=sought_or_none(owner, subject="list_schedules.owner"),
            prefix=sought_or_none(prefix, subject="list_schedules.prefix"),
            after=sought_or_none(after, subject="list_schedules.after"),
            limit=_limit(limit, subject="limit"),
        )
    )


def _info(name: str) -> Plan[ScheduleInfo]:
    return _known(_name(name, subject="schedule_info.name"))


def _next(name: str, n: int) -> Plan[list[datetime]]:
    return _upcoming(_name(name, subject="next_ticks.name"), _few(n, subject="next_ticks.n"))


def _upcoming(name: str, n: int) -> Plan[list[datetime]]:
    return list(islice(next_ticks_of((yield from _known(name))), n))


def _ticks(name: str, before: datetime | None, limit: int) -> Plan[list[TickInfo]]:
    return _decided(
        _name(name, subject="list_ticks.name"),
        None if before is None else to_past_moment(before, subject="list_ticks.before"),
        _limit(limit, subject="limit"),
    )


def _decided(name: str, before: datetime | None, limit: int) -> Plan[list[TickInfo]]:
    found = yield from ask(schedules.list_ticks(name, limit=limit, before=before))
    if not found:
        yield from _known(name)
    return found


def _pause(name: str, reason: str | None, until: Until | None) -> Plan[ScheduleInfo]:
    return _paused(
        _name(name, subject="pause_schedule.name"),
        None if reason is None else remark(reason, subject="pause_schedule.reason"),
        None if until is None else to_until(until, subject="pause_schedule.until"),
    )


def _paused(name: str, reason: str | None, until: When | None) -> Plan[ScheduleInfo]:
    resume_at = None
    if until is not None:
        resume_at = to_future(until, now=(yield from ask(read_clock())), subject="pause_schedule.until")
    yield from ask(schedules.pause_schedule(name, paused_by="operator", reason=reason, resume_at=resume_at))
    return (yield from _known(name))


def _resume(name: str) -> Plan[ScheduleInfo]:
    return _resumed(_name(name, subject="resume_schedule.name"))


def _resumed(name: str) -> Plan[ScheduleInfo]:
    # Read the pause first. If the reply to the statement is lost, a retry can no longer find the pause.
    found = yield from _known(name)
    if found.paused_at is None:
        paused = yield from ask(schedules.list_schedules(state="PAUSED"))
        raise NotPaused("schedule", name, paused=[each.name for each in paused])
    yield from ask(schedules.resume_schedule(name))
    return (yield from _known(name))


def _delete(name: str) -> Plan[None]:
    return _deleted(_name(name, subject="delete_schedule.name"))


def _deleted(name: str) -> Plan[None]:
    # Read the schedule first. If the reply to the statement is lost, a retry can no longer find the schedule.
    yield from _known(name)
    change = yield from ask(schedules.delete_schedule(name))
    if change is not None and change.verdict == "declared":
        raise ScheduleNotChanged(name, owner=change.owner or "")


def next_ticks_of(found: ScheduleInfo) -> Iterator[datetime]:
    """Yield the ticks of a schedule that are still to come, in order."""
    rule = _readable(found)
    if found.state in ("ENDED", "RETIRED"):
        return
    pause_ends = found.resume_at if found.paused_at is not None else None
    jitter = timedelta(milliseconds=rule.jitter_ms)
    moments = [found.decided_to, found.at - jitter, found.held_until, pause_ends]
    left = None if rule.most_runs is None else max(rule.most_runs - found.runs, 0)
    ticks = rule_ticks(rule, after=max(each for each in moments if each is not None))
    for tick in islice(ticks, left):
        if due_at(rule, found.name, tick) > found.at:
            yield tick


def _ticks_between(found: ScheduleInfo, since: datetime, until: datetime) -> list[datetime]:
    """Return the past ticks in [since, until). Raises ConfigurationError if there are too many."""
    rule = _readable(found)
    ticks = takewhile(
        lambda tick: tick < until and tick <= found.at, rule_ticks(rule, after=since - _INSTANT)
    )
    if len(within := list(islice(ticks, _MOST_BACKFILLED + 1))) <= _MOST_BACKFILLED:
        return within
    raise refused(
        until.isoformat(),
        subject="backfill.until",
        code="OUT_OF_RANGE",
        rule=f"the range contains more than {_MOST_BACKFILLED:,} ticks",
        fix=f"use {within[-1].isoformat()} or earlier, and then backfill the rest",
    )


def _readable(found: ScheduleInfo) -> Rule:
    if found.rule is None:
        raise refused(
            found.name,
            subject="schedule",
            code="UNREADABLE",
            rule="the stored rule of this schedule is unreadable",
            fix="store it again with put_schedule",
        )
    zone = found.rule.timing.timezone
    if not zone_is_known(zone):
        raise refused(
            zone,
            subject=f"timezone of schedule {found.name!r}",
            code="TIMEZONE_UNKNOWN",
            rule="is not a time zone that this machine knows",
            fix="install the Python package tzdata here",
        )
    return found.rule
