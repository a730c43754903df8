"""`Limit`, which declares how many tasks can run at the same time and how many can start in a period."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, cast

from everbeat.domain.limit.model import LONGEST_KEY_BYTES, LimitDefinition, WhenFull
from everbeat.domain.settings.checks import (
    checked_mapping,
    limit_name,
    one_of,
    optional,
    sequence_of,
    whole,
)
from everbeat.domain.settings.settings import Settings, by, checked, refused
from everbeat.domain.settings.units import span, spelled_duration
from everbeat.errors import ConfigurationError, Problem

MOST_PERMITS: Final = 1_000_000
MOST_SLIDING_STARTS: Final = 1_000
_MOST_WEIGHT: Final = 1_000
_RATE: Final = re.compile(r"\s*(-?[0-9]{1,18})\s*/\s*(\S(?:.*\S)?)\s*")
_WORDS: Final = {"sec": "s", "second": "s", "min": "m", "minute": "m", "hour": "h", "day": "d"}
_RATE_RULE: Final = 'must be a number of starts and a period, such as "100/10s" or "5/m"'
_RATE_FIX: Final = 'write "100/10s" for 100 starts in 10 seconds, for example'
_starts: Final = whole(1, MOST_PERMITS)
_period: Final = span(0.1, 365 * 86_400.0)
_permits: Final = whole(1, MOST_PERMITS)


def _at_same_time(value: object, /, *, subject: str) -> int:
    if value == 0 and not isinstance(value, bool):
        rule = f"must be a whole number from 1 to {MOST_PERMITS}"
        fix = "use 1 or more; to let no task start for a while, call app.set_limit(NAME, concurrency=0)"
        raise refused(value, subject=subject, code="OUT_OF_RANGE", rule=rule, fix=fix)
    number: int = _permits(value, subject=subject)
    return number


concurrency: Final = optional(_at_same_time, none="sets no limit of tasks at the same time")
"""Checks the number of tasks that can run at the same time."""


def _listed_name(value: object, /, *, subject: str) -> str:
    if isinstance(value, Limit):
        rule = "must be the name of a limit, not a Limit"
        fix = f"write {value.name!r}, and declare the limit with App(limits=[...])"
        raise refused(value, subject=subject, code="WRONG_TYPE", rule=rule, fix=fix)
    name: str = limit_name(value, subject=subject)
    return name


_names: Final = sequence_of(_listed_name, longest=10)
_ELSEWHERE: Final[Mapping[str, str]] = {
    "cost": "write @app.task(limits=[...], costs={NAME: 2}) or task.with_options(costs={NAME: 2})",
    "period": 'write rate="100/10s"',
    "per": 'write rate="100/10s"',
    "starts": 'write rate="100/10s"',
    "max_concurrency": "use concurrency",
    "limit": "use concurrency, or rate",
    "duration": "leave it out: a permit is free when the task of its lease ends, or is recovered",
    "on_conflict": "use when_full",
    "partition": "use key",
}


def parse_rate(value: object, /, *, subject: str) -> tuple[int, float]:
    """Return the number of starts and the period in seconds. Raises ConfigurationError if the rate is invalid."""
    found = _RATE.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        code = "WRONG_RATE" if isinstance(value, str) else "WRONG_TYPE"
        raise refused(value, subject=subject, code=code, rule=_RATE_RULE, fix=_RATE_FIX)
    period = _WORDS.get(found[2], found[2])
    starts: int = _starts(int(found[1]), subject=f"{subject} (starts)")
    seconds: float = _period(f"1{period}" if period.isalpha() else period, subject=f"{subject} (period)")
    return starts, seconds


def rate(value: object, /, *, subject: str) -> str:
    """Return the rate in its normal form, such as "100/10s". Raises ConfigurationError if it is invalid."""
    return spelled_rate(*parse_rate(value, subject=subject))


def spelled_rate(starts: int, period_s: float) -> str:
    """Return a rate as text that `parse_rate` can read."""
    return f"{starts}/{spelled_duration(period_s)}"


def limit_names(value: object, /, *, subject: str) -> tuple[str, ...]:
    """Return the names of a task's limits. Raises ConfigurationError if a name is invalid or given twice."""
    names: tuple[str, ...] = _names(value, subject=subject)
    if twice := sorted({name for name in names if names.count(name) > 1}):
        rule = f"names {', '.join(twice)} more than once"
        raise refused(value, subject=subject, code="DUPLICATE", rule=rule, fix="name each limit once")
    return names


def costs(value: object, /, *, subject: str) -> Mapping[str, int]:
    """Return the permits that a task takes, by limit. Raises ConfigurationError if a name or number is invalid."""
    return _by_name(value, _permits, subject=subject, example="costs={'gpu': 2}")


def keys(value: object, /, *, subject: str) -> Mapping[str, str | None]:
    """Return the keys that a sender gives, by limit. None stands for a limit without keys."""
    check = optional(key_text, none="is for a limit without a key")
    given = _by_name(value, check, subject=subject, example="limits={'tenant': 'acme'}")
    return {name: None if key is None else key_text(key, subject=subject) for name, key in given.items()}


def key_text(value: object, /, *, subject: str) -> str:
    """Return the text of a key. Raises ConfigurationError if it is not a text, a whole number, True or False."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    if not isinstance(value, str):
        rule = f"must be a text or a whole number, not {type(value).__name__}"
        raise refused(value, subject=subject, code="WRONG_TYPE", rule=rule, fix="pass a text such as 'acme'")
    if "\x00" in value or value.encode(errors="replace").decode() != value:
        rule = "must not contain NUL characters or lone surrogates"
        raise refused(value, subject=subject, code="WRONG_KEY", rule=rule, fix="use a key such as 'acme'")
    return value


def _by_name(value: object, check: Any, *, subject: str, example: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        rule = f"must map the names of limits to values, not be of type {type(value).__name__}"
        raise refused(value, subject=subject, code="WRONG_TYPE", rule=rule, fix=f"write {example}")
    return checked_mapping(value, limit_name, check, subject=subject)


def _path(value: object, /, *, subject: str) -> str:
    if isinstance(value, str) and re.fullmatch(r"[^\W\d]\w*(\.\w+)*", value):
        return value
    rule = "must be the name of a parameter, or a path into one"
    fix = 'use a key such as "tenant_id" or "order.tenant_id"'
    code = "WRONG_KEY" if isinstance(value, str) else "WRONG_TYPE"
    raise refused(value, subject=subject, code=code, rule=rule, fix=fix)


def _weights(value: object, /, *, subject: str) -> Mapping[str, int]:
    if not isinstance(value, Mapping):
        rule = f"must map keys to weights, not be of type {type(value).__name__}"
        raise refused(value, subject=subject, code="WRONG_TYPE", rule=rule, fix="write {'acme': 2}")
    given = checked_mapping(value, _weight_key, whole(1, _MOST_WEIGHT), subject=subject)
    texts = [key_text(key, subject=subject) for key in given]
    if twice := sorted({text for text in texts if texts.count(text) > 1}):
        rule = f"has more than one key with the text {', '.join(map(repr, twice))}, because a key is stored as text"
        raise refused(value, subject=subject, code="DUPLICATE", rule=rule, fix="give each key one weight")
    return dict(zip(texts, given.values(), strict=True))


def _weight_key(value: object, /, *, subject: str) -> str:
    text = key_text(value, subject=subject)
    if len(text.encode()) > LONGEST_KEY_BYTES:
        rule = f"must have at most {LONGEST_KEY_BYTES} bytes, because a longer key is stored as its hash"
        raise refused(value, subject=subject, code="WRONG_KEY", rule=rule, fix="use a shorter key")
    return text


@checked
@dataclass(frozen=True, slots=True, kw_only=True)
class Limit(Settings):
    """A limit of the tasks that can run at the same time, and of the starts in a period, for all tasks that name it.

    - `concurrency`: the number of permits. A task holds its permit from its claim until its lease ends.
    - `rate`: the number of starts per period, such as "100/10s". `burst` of them can start at once.
    - `window`: "smooth" spreads the starts over the period. With "sliding", no window of that length contains more starts.
    - `key`: a parameter, or a path into one, such as "order.tenant_id". The numbers then apply to each value separately.
    - `fairness`: "fifo" starts tasks in the order in which they were sent. "round_robin" takes turns among the keys, and
      `weights` gives some keys more turns.
    - `when_full`: whether a task must "wait", or the send returns the existing task ("drop"), or only the "newest" task waits.

    Raises ConfigurationError, which lists all problems, if a setting is invalid.

        Limit("stripe", concurrency=20, rate="100/10s", burst=10)
        Limit("tenant", concurrency=3, key="tenant_id", fairness="round_robin")
    """

    name: str = field(kw_only=False, metadata=by(limit_name))
    concurrency: int | None = field(default=None, metadata=by(concurrency))
    rate: str | None = field(default=None, metadata=by(optional(rate, none="sets no limit of starts")))
    burst: int | None = field(default=None, metadata=by(optional(_permits, none="is a burst of 1")))
    window: Literal["smooth", "sliding"] = field(default="smooth", metadata=by(one_of("smooth", "sliding")))
    key: str | None = field(default=None, metadata=by(optional(_path, none="is one limit for all tasks")))
    fairness: Literal["fifo", "round_robin"] = field(
        default="fifo", metadata=by(one_of("fifo", "round_robin"))
    )
    weights: Mapping[str, int] = field(default_factory=dict, metadata=by(_weights), hash=False)
    when_full: WhenFull = field(default="wait", metadata=by(one_of("wait", "drop", "newest")))

    @property
    def path(self) -> tuple[str, ...]:
        """Return the path of the argument that is the key, or an empty tuple if the limit has no key."""
        return () if self.key is None else tuple(self.key.split("."))

    @property
    def bounds(self) -> dict[str, int]:
        """Return the largest numbers of permits that one task can take, by the settings that determine them."""
        found = {} if self.concurrency is None else {"concurrency": self.concurrency}
        if self.rate is not None:
            found |= {"rate": self._starts} if self.window == "sliding" else {"burst": self.burst or 1}
        return found

    @property
    def _starts(self) -> int:
        return parse_rate(self.rate, subject="Limit.rate")[0]

    def definition(self) -> LimitDefinition:
        """Return the limit in the form in which it is stored."""
        starts, period_s = (None, None) if self.rate is None else parse_rate(self.rate, subject="Limit.rate")
        return LimitDefinition(
            name=self.name,
            concurrency=self.concurrency,
            starts=starts,
            period_s=period_s,
            burst=self.burst or 1,
            sliding=self.window == "sliding",
            fair=self.fairness == "round_robin",
            weights=dict(self.weights),
            when_full=self.when_full,
            key=self.key,
        )

    @classmethod
    def _decided_elsewhere(cls, name: str) -> tuple[str, str] | None:
        fix = _ELSEWHERE.get(name)
        return None if fix is None else ("is not a setting of a limit", fix)

    def _contradictions(self) -> Iterator[Problem]:
        if self.concurrency is None and self.rate is None:
            yield self._problem("", "limits nothing", "pass concurrency, rate, or both", code="MISSING")
        if self.rate is None and self.burst is not None:
            yield self._problem("burst", "needs a rate", 'pass rate="100/10s", for example, or omit burst')
        if self.window == "sliding":
            yield from self._of_window()
        if self.key is None and self.fairness == "round_robin":
            rule = "takes turns among keys, but this limit has no key"
            yield self._problem("fairness", rule, 'pass key="tenant_id", for example, or omit fairness')
        if self.weights and self.fairness != "round_robin":
            fix = 'pass fairness="round_robin", or omit weights'
            yield self._problem("weights", "needs fairness='round_robin'", fix)
        if self.when_full == "drop" and self.concurrency is None:
            rule = "'drop' compares the tasks with concurrency, which is not set"
            yield self._problem("when_full", rule, 'pass concurrency, or use "newest"')

    def _of_window(self) -> Iterator[Problem]:
        if self.rate is None:
            yield self._problem("window", "needs a rate", 'pass rate="100/10s", for example, or omit window')
            return
        if self.burst is not None:
            rule = "has no effect with window='sliding', which permits all starts of the window at once"
            yield self._problem("burst", rule, "omit burst, or use window='smooth'")
        try:
            starts = self._starts
        except ConfigurationError:
            return  # the rate violates its own rule
        if starts > MOST_SLIDING_STARTS:
            rule = f"permits at most {MOST_SLIDING_STARTS:,} starts per period with window='sliding'"
            fix = "use a shorter period with fewer starts, or window='smooth'"
            yield self._problem("rate", rule, fix, code="OUT_OF_RANGE")

    def _problem(self, name: str, rule: str, fix: str, *, code: str = "CONTRADICTION") -> Problem:
        subject = f"Limit.{name}" if name else f"Limit {cast(object, self.name)!r}"
        value = repr(getattr(self, name)) if name else "nothing"
        return Problem(code=code, subject=subject, value=value, rule=rule, fix=fix)
