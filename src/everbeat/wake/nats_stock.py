"""What a stream still holds: read and taken out again, so that messages of tasks that have ended do not stay.

No consumer is used for this: a message can be one that no consumer delivers any more.
"""

from __future__ import annotations

import asyncio
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from everbeat.wake.carrier import Stored, decode
from everbeat.wake.nats_link import LinkLost, NoResponders, reason_of
from everbeat.wake.nats_problems import NO_CONSUMER, NO_MESSAGE, NO_STREAM, ApiProblem
from everbeat.wake.nats_stream import StreamKeeper, ask
from everbeat.wake.stream_plan import StreamPlan

NO_SEQUENCE: Final = 10043
_MOST_PAGES: Final = 100


class StreamStock:
    """The messages of the stream. `keeper` raises ConnectionError while there is no link, as every method here does."""

    def __init__(self, plan: StreamPlan, keeper: Callable[[], StreamKeeper]) -> None:
        self._plan = plan
        self._keeper = keeper

    async def count(self) -> Mapping[str, int]:
        """Count the messages by queue subject."""
        found: dict[str, int] = {}
        for _ in range(_MOST_PAGES):
            body = {"subjects_filter": self._plan.subjects, "offset": len(found)}
            answer = await self._ask(f"STREAM.INFO.{self._plan.stream}", body)
            if answer is None:
                break
            page: dict[str, int] = answer["state"].get("subjects") or {}
            found |= page
            if not page or len(found) >= answer.get("total", 0):
                break
        return {subject: count for subject, count in found.items() if count}

    def subject(self, queue: str) -> str:
        """Where messages of a queue lie."""
        return self._plan.subject(queue)

    async def read(self, subject: str, *, first: int, limit: int, older_s: float) -> Sequence[Stored]:
        """Read at most `limit` messages from a place on, up to the first that is younger than `older_s` by the server's clock."""
        found: list[Stored] = []
        info = await self._ask(f"STREAM.INFO.{self._plan.stream}")
        now = None if info is None else _moment(info.get("ts"))
        while now is not None and len(found) < limit:
            answer = await self._ask(
                f"STREAM.MSG.GET.{self._plan.stream}", {"seq": first, "next_by_subj": subject}
            )
            if answer is None:
                break
            held = answer["message"]
            stored_at = _moment(held.get("time"))
            if stored_at is not None and (now - stored_at).total_seconds() < older_s:
                break
            found.append(Stored(place=held["seq"], message=decode(b64decode(held.get("data", "")))))
            first = held["seq"] + 1
        return found

    async def take_out(self, subject: str, places: Sequence[int], *, before: int | None) -> None:
        """Remove the messages at these places. `before`: every message of this subject in front of that place goes, by one request."""
        if before is not None:
            await self._ask(f"STREAM.PURGE.{self._plan.stream}", {"filter": subject, "seq": before})
        single = [place for place in places if before is None or place >= before]
        delete = f"STREAM.MSG.DELETE.{self._plan.stream}"
        await asyncio.gather(*(self._ask(delete, {"seq": place, "no_erase": True}) for place in single))

    async def is_wanted(self, queue: str) -> bool:
        """Return whether a worker waits for messages of this queue at this moment."""
        answer = await self._ask(f"CONSUMER.INFO.{self._plan.stream}.{self._plan.consumer(queue)}")
        return answer is not None and answer.get("num_waiting", 0) > 0

    async def _ask(self, subject: str, body: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        """Return the answer, None where what was asked for is not there."""
        try:
            return await ask(self._keeper().link, subject, None if body is None else dict(body))
        except ApiProblem as problem:
            if problem.err_code in (NO_MESSAGE, NO_STREAM, NO_CONSUMER, NO_SEQUENCE):
                return None
            raise ConnectionError(str(problem)) from None
        except (LinkLost, NoResponders, TimeoutError) as problem:
            raise ConnectionError(reason_of(problem)) from None


def _moment(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)
