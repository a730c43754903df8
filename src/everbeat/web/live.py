"""The live pages of one dashboard: they share one watch of the pulse, and each part is rendered once for all viewers."""

from __future__ import annotations

import hashlib
import logging
import secrets
import traceback
from collections.abc import AsyncIterator, Callable, Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Struct
from sse_starlette.sse import EventSourceResponse
from starlette.responses import Response

from everbeat.client.explaining import silence_rules
from everbeat.client.pulse import SINCE, IncidentWatch, PulseWatch
from everbeat.domain.pulse.actions import ActionMemory
from everbeat.domain.pulse.incidents import Incident
from everbeat.domain.pulse.judging import TreeCounts
from everbeat.domain.pulse.memory import PulseMemory
from everbeat.errors import DatabaseError
from everbeat.runtime.clock import SystemClock
from everbeat.web.page import Visit
from everbeat.web.refusals import RequestRefused

if TYPE_CHECKING:
    from everbeat.web.application import Web

_log = logging.getLogger("everbeat.web")
MOST_INCIDENTS: Final = 1_000
"""How many recoveries of the last 24 hours are grouped into incidents: the latest ones."""
MOST_VIEWERS: Final = 200
LONGEST_STREAM_S: Final = 300.0
"""After this time, a stream ends and the browser opens it again: the dashboard then checks again who the user is."""
_SEND_TIMEOUT_S: Final = 20
_PING_S: Final = 15


class PulsePicture(Struct, frozen=True):
    """The content of the live pages at one sample: the memory of the pulse, the incidents of the last 24 hours, and the database's time.

    `is_past`: it is the picture of a past moment. Whether sessions were held then is not recorded. `has_incidents` is False if the incidents
    could not be read, so that no page says that there was none.
    """

    memory: PulseMemory
    incidents: list[Incident]
    at: datetime
    crew: TreeCounts
    problem: DatabaseError | None = None
    is_past: bool = False
    has_incidents: bool = True


Parts = Mapping[str, str]
"""The HTML of each part of a page, by the id of its element."""


class Live:
    """Watches the pulse while pages are watched. One sample serves all viewers of all live pages."""

    def __init__(self, web: Web) -> None:
        self._web = web
        self._clock = SystemClock()
        self._watch: PulseWatch | None = None
        self._incidents: IncidentWatch | None = None
        self._rendered: dict[str, tuple[int, Parts]] = {}
        self._origin = secrets.token_hex(4)

    async def aclose(self) -> None:
        """Stop sampling, and end all streams."""
        watch, self._watch = self._watch, None
        if watch is not None:
            await watch.close()

    @property
    def viewers(self) -> int:
        """Return how many streams are open."""
        return 0 if self._watch is None else self._watch.viewers

    async def picture(self) -> PulsePicture:
        """Return a picture that is at most a second old. Raises DatabaseError if there is none."""
        watch, incidents = await self._opened()
        memory = await watch.look()
        return await self._seen(memory, incidents)

    async def mark(self) -> str:
        """Return the place in the order of operators' actions for a page that is read next. Raises DatabaseError."""
        watch, _ = await self._opened()
        actions = await watch.look_at_actions()
        return f"{self._origin}.{actions.number}.{actions.last_id or 0}"

    def place_of(self, mark: str) -> Callable[[ActionMemory], int]:
        """Return how to find the place of a mark. Another process numbers the actions differently, so only the id of its mark counts."""
        origin, _, rest = mark.partition(".")
        number, _, last_id = rest.partition(".")
        if not (number.isdecimal() and last_id.isdecimal()) or len(rest) > _LONGEST_MARK:
            raise RequestRefused(400, "WRONG_FORM", "The parameter 'after' is not a mark of a page.")
        if origin == self._origin:
            return lambda _: int(number)
        return lambda actions: actions.number_of(int(last_id))

    async def stream(
        self, visit: Visit, key: str, render: Callable[[PulsePicture], Parts], *, moves: bool = True
    ) -> Response:
        """Return a stream of the parts of a page that changed. `key` names the page and everything that its rendering depends on.

        With `calm` in the address, for a viewer who prefers reduced motion, every tenth look is sent, and those with a recovery. This has no
        effect on a page that does not move. With `once`, the stream ends after the first look.
        """
        calm, once = (visit.query.get(name) is not None for name in ("calm", "once"))
        watch, incidents = await self._opened()
        if watch.viewers >= MOST_VIEWERS:
            return Response(_FULL, 503, headers={"retry-after": str(_FULL_FOR_S)})
        every = _CALM_LOOKS if calm and moves else 1

        def told(problem: DatabaseError) -> str:
            return self._web.problems.told(problem, visit.user).message

        events = self._events(watch, incidents, key, render, told=told, every=every, once=once)
        return EventSourceResponse(events, ping=_PING_S, send_timeout=_SEND_TIMEOUT_S)

    async def _events(
        self,
        watch: PulseWatch,
        incidents: IncidentWatch,
        key: str,
        render: Callable[[PulsePicture], Parts],
        *,
        told: Callable[[DatabaseError], str],
        every: int,
        once: bool,
    ) -> AsyncIterator[dict[str, Any]]:
        sent: dict[str, str] = {}
        if watch.viewers >= MOST_VIEWERS:  # others, who were admitted at the same time, came first
            yield {"event": "away", "data": _json({"problem": _FULL}), "retry": _FULL_FOR_S * 1_000}
            return
        yield {"event": "hello", "data": "{}", "retry": 1_000}
        looks, was_away, ends_at = 0, False, self._clock.monotonic() + LONGEST_STREAM_S
        async with watch.watching() as next_look:
            while await next_look() and (looks == 0 or self._clock.monotonic() < ends_at):
                looks += 1
                if watch.problem is not None:
                    was_away = True
                    yield {"event": "away", "data": _json({"problem": told(watch.problem)})}
                    if once:
                        return
                    continue
                if (looks - 1) % every and not _has_news(watch) and not was_away:
                    if looks % _ALIVE_LOOKS == 0:
                        yield _ALIVE
                    continue
                try:
                    parts = await self._parts(watch, incidents, key, render)
                except Exception as problem:  # noqa: BLE001 - the message of a defect can contain a payload
                    frames = "".join(traceback.format_tb(problem.__traceback__))
                    _log.error("A live page failed with %s:\n%s", type(problem).__name__, frames)
                    yield {"event": "away", "data": _json({"problem": "this page has a defect"})}
                    return
                changed = {name: html for name, html in parts.items() if sent.get(name) != _digest(html)}
                if changed or was_away:  # an event without parts says that the page is live again
                    was_away = False
                    sent |= {name: _digest(html) for name, html in changed.items()}
                    yield {"event": "parts", "data": _json(changed)}
                elif looks % _ALIVE_LOOKS == 0:
                    yield _ALIVE
                if once:
                    return

    async def _parts(
        self, watch: PulseWatch, incidents: IncidentWatch, key: str, render: Callable[[PulsePicture], Parts]
    ) -> Parts:
        number = watch.looks
        known = self._rendered.get(key)
        if known is None or known[0] != number:
            self._rendered = {name: each for name, each in self._rendered.items() if each[0] == number}
            known = self._rendered[key] = (number, render(await self._seen(watch.memory, incidents)))
        return known[1]

    async def _seen(self, memory: PulseMemory, incidents: IncidentWatch) -> PulsePicture:
        at = self._clock.wall() if memory.last is None else memory.last.at
        try:
            found, problem = await incidents.incidents(), None
        except DatabaseError as failure:
            found, problem = incidents.last, failure
        crew = _crew(memory, incidents, at=at)
        return PulsePicture(memory, found, at, crew, problem, has_incidents=problem is None)

    def crew(self) -> TreeCounts | None:
        """Return the state of all trees for the header, or None if no sample was taken in the last seconds."""
        watch, incidents = self._watch, self._incidents
        if watch is None or incidents is None or watch.memory.last is None or watch.age_s > _FRESH_S:
            return None
        return _crew(watch.memory, incidents, at=watch.memory.last.at)

    async def _opened(self) -> tuple[PulseWatch, IncidentWatch]:
        reading = await self._web.reading()
        if self._watch is None or self._incidents is None:
            app = self._web.app
            self._watch = PulseWatch(reading.arun, rules=silence_rules(app.recovery), clock=self._clock)

            async def recoveries() -> Any:
                with self._web.access.reading_from(reading):
                    return await app.arecoveries(since=SINCE, limit=MOST_INCIDENTS)

            async def departed() -> Any:
                with self._web.access.reading_from(reading):
                    return await app.alist_supervisors(ended=True)

            self._incidents = IncidentWatch(
                self._watch, most=MOST_INCIDENTS, recoveries=recoveries, departed=departed, clock=self._clock
            )
        return self._watch, self._incidents


_FULL: Final = "too many viewers"
_FULL_FOR_S: Final = 30
_CALM_LOOKS: Final = 10
_ALIVE_LOOKS: Final = 4
"""After how many looks the stream says that nothing has changed. The page counts on an event every ten seconds."""
_ALIVE: Final = {"event": "alive", "data": "{}"}
_FRESH_S: Final = 3.0
_LONGEST_MARK: Final = 40
_DEAD_FOR: Final = timedelta(hours=1)


def _crew(memory: PulseMemory, incidents: IncidentWatch, *, at: datetime) -> TreeCounts:
    states = (trace.judgement.state for trace in memory.traces)
    return TreeCounts.of(states, dead=incidents.died_since(at - _DEAD_FOR))


def _has_news(watch: PulseWatch) -> bool:
    last = watch.memory.last
    return last is not None and bool(last.recoveries)


def _digest(html: str) -> str:
    return hashlib.sha256(html.encode()).hexdigest()


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
