"""The `App` methods for limits."""

from __future__ import annotations

from typing import Any, Final, Unpack

from msgspec import structs

from everbeat.client.database_access import DatabaseMethods
from everbeat.client.sender import CallSender
from everbeat.domain.limit.inspection import LimitChanges, LimitInfo
from everbeat.domain.limit.options import MOST_PERMITS, MOST_SLIDING_STARTS, parse_rate
from everbeat.domain.settings.checks import optional, remark, sought, whole
from everbeat.domain.settings.settings import FieldCheck, refused, unknown_names
from everbeat.domain.settings.units import to_future, to_until
from everbeat.errors import ConfigurationError, Problem, UnknownName
from everbeat.store import limits
from everbeat.store.inspection import read_clock
from everbeat.store.plan import Plan, ask

_OPERATOR: Final = "operator"


_CHECKS: Final[dict[str, FieldCheck]] = {
    "concurrency": optional(
        whole(0, MOST_PERMITS), none="sets no limit of tasks at the same time", shell_none="none for no limit"
    ),
    "rate": optional(parse_rate, none="sets no limit of starts", shell_none="none for no limit"),
    "burst": whole(1, MOST_PERMITS),
    "until": optional(to_until, none="sets no end"),
    "reason": optional(remark, none="stores no reason"),
}
_NO_NUMBER: Final = Problem(
    code="MISSING",
    subject="set_limit",
    value="nothing",
    rule="changes no number",
    fix="pass concurrency=50, for example",
    shell_fix="write --concurrency 50, for example",
)


class LimitMethods(DatabaseMethods):
    """The `App` methods for limits."""

    _sender: CallSender

    def limits(self) -> list[LimitInfo]:
        """Return the stored limits in the order of their names, with the permits in use and the number of waiting tasks."""
        return self._run("limits", ask(limits.list_limits()))

    async def alimits(self) -> list[LimitInfo]:
        """Async version of `limits` that does not block the running event loop."""
        return await self._arun(ask(limits.list_limits()))

    def limit_info(self, name: str, /) -> LimitInfo:
        """Return a limit with its keys in use and the holders of its permits. Raises UnknownName if it does not exist.

        app.limit_info("stripe").holders
        """
        return self._run("limit_info", _info(name))

    async def alimit_info(self, name: str, /) -> LimitInfo:
        """Async version of `limit_info` that does not block the running event loop."""
        return await self._arun(_info(name))

    def set_limit(self, name: str, /, **changes: Unpack[LimitChanges]) -> LimitInfo:
        """Replace numbers of a limit for all processes (see `LimitChanges`). Return the limit.

        The numbers take effect within a second, also for tasks that are waiting. A later declaration by code does not replace them. Omitted
        values, also `until` and `reason`, stay as an earlier call set them; `clear_limit` starts anew. Raises
        UnknownName if the limit does not exist, and ConfigurationError, which lists all problems, if a value is invalid.

            app.set_limit("stripe", concurrency=50, reason="their incident is over")
        """
        return self._run("set_limit", self._set(name, changes))

    async def aset_limit(self, name: str, /, **changes: Unpack[LimitChanges]) -> LimitInfo:
        """Async version of `set_limit` that does not block the running event loop."""
        return await self._arun(self._set(name, changes))

    def clear_limit(self, name: str, /) -> LimitInfo:
        """Restore the numbers that the code declares, and return the limit. Raises UnknownName if it does not exist."""
        return self._run("clear_limit", self._clear(name))

    async def aclear_limit(self, name: str, /) -> LimitInfo:
        """Async version of `clear_limit` that does not block the running event loop."""
        return await self._arun(self._clear(name))

    def _set(self, name: str, changes: LimitChanges) -> Plan[LimitInfo]:
        known = sought(name, subject="set_limit.name")
        plan = _set(known, _checked(changes), channel=self._database.channel)
        return self._sender.declarations.before(
            plan, None
        )  # an operator can set a limit before its first task

    def _clear(self, name: str) -> Plan[LimitInfo]:
        return _cleared(sought(name, subject="clear_limit.name"), channel=self._database.channel)


def _checked(changes: LimitChanges) -> dict[str, Any]:
    """Return the changes in their normal form. Raises one ConfigurationError with all problems."""
    problems: list[Problem] = unknown_names("set_limit", "number", _CHECKS, changes)
    found: dict[str, Any] = {}
    for name, value in changes.items():
        if (check := _CHECKS.get(name)) is not None:
            try:
                found[name] = check(value, subject=f"set_limit.{name}")
            except ConfigurationError as error:
                problems += error.problems
    if problems:
        raise ConfigurationError(problems)
    if not found.keys() & {"concurrency", "rate", "burst"}:
        raise ConfigurationError([_NO_NUMBER])
    return found


def _set(name: str, changes: dict[str, Any], *, channel: str) -> Plan[LimitInfo]:
    before = yield from _known(name)
    until = changes.get("until")
    if before.until is not None or until is not None:
        now = yield from ask(read_clock())
        if until is not None:
            until = to_future(until, now=now, subject="set_limit.until")
        if before.until is not None and before.until <= now:  # no worker has restored the numbers yet
            before = yield from _cleared(name, channel=channel)
    rate, burst = changes.get("rate"), changes.get("burst")
    if before.window == "sliding" and rate is not None and rate[0] > MOST_SLIDING_STARTS:
        rule = f"limit {name!r} has a sliding window, which permits at most {MOST_SLIDING_STARTS:,} starts"
        fix = "use a shorter period with fewer starts"
        raise refused(rate[0], subject="set_limit.rate", code="OUT_OF_RANGE", rule=rule, fix=fix)
    if burst is not None and (before.window == "sliding" or changes.get("rate", before.numbers.rate) is None):
        rule = f"has no effect, because limit {name!r} has no rate that is smooth"
        fix = "set a rate, too, or omit burst"
        raise refused(burst, subject="set_limit.burst", code="CONTRADICTION", rule=rule, fix=fix)
    statement = limits.set_limit(
        name,
        concurrency=changes.get("concurrency"),
        rate=rate,
        burst=burst,
        sets_concurrency="concurrency" in changes,
        sets_rate="rate" in changes,
        sets_reason="reason" in changes,
        sets_until="until" in changes,
        set_by=_OPERATOR,
        reason=changes.get("reason"),
        until=until,
        channel=channel,
    )
    yield from ask(statement)
    return (yield from _known(name))


def _cleared(name: str, *, channel: str) -> Plan[LimitInfo]:
    yield from ask(limits.clear_limit(name, channel=channel))
    return (yield from _known(name))


def _info(name: str) -> Plan[LimitInfo]:
    return _detailed(sought(name, subject="limit_info.name"))


def _detailed(name: str) -> Plan[LimitInfo]:
    found = yield from _known(name)
    in_use = yield from ask(limits.list_gates([name]))
    holders = yield from ask(limits.list_holders([name]))
    return structs.replace(found, in_use=tuple(in_use.get(name, ())), holders=tuple(holders.get(name, ())))


def _known(name: str) -> Plan[LimitInfo]:
    found = yield from ask(limits.list_limits(name))
    if not found:
        raise UnknownName("limit", [name], known=(yield from ask(limits.known_limits())))
    return found[0]
