"""Inspect NATS: whether it is usable, and which messages the stream holds."""

from __future__ import annotations

import asyncio
from base64 import b64decode
from collections.abc import Callable, Coroutine, Mapping, Sequence
from datetime import datetime
from random import Random
from typing import Any, Final, TypeVar

from everbeat.domain.doctor.nats import StreamFacts
from everbeat.errors import NatsUnreachable
from everbeat.nats.link import LinkLost, NatsLink, NoResponders, reason_of
from everbeat.nats.options import NatsConfig
from everbeat.nats.problems import (
    NO_CONSUMER,
    NO_MESSAGE,
    NO_STREAM,
    ApiProblem,
    no_jetstream,
    no_right,
    of_api,
    of_stream,
)
from everbeat.nats.stream import TROUBLE, StreamKeeper, ask
from everbeat.nats.stream_plan import Stored, StreamPlan, decode

CHECK_TIMEOUT_S: Final = 5.0

T = TypeVar("T")
_RETRY_S: Final = 0.25
_RIGHT_S: Final = 2.0


async def check(plan: StreamPlan, config: NatsConfig) -> None:
    """Ensure that the stream exists, creating it if necessary. Raises NatsUnreachable or NatsRefused within about 5 s if that fails."""
    random = Random()

    async def ensure(link: NatsLink) -> None:
        await StreamKeeper(link, plan, random).ensure(())
        await _try_to_publish(link, plan)

    await ask_once(
        config, ensure, name="everbeat check", random=random, what=f"did not get stream {plan.stream!r} ready"
    )


async def _try_to_publish(link: NatsLink, plan: StreamPlan) -> None:
    """Raise NatsRefused if the user cannot publish, in which case the server sends no reply. The test message is never stored."""
    try:
        async with asyncio.timeout(_RIGHT_S):
            await link.request_later(plan.subject("default"), b"", headers={"Nats-Expected-Stream": "none"})
    except TimeoutError:
        if link.last_reason is not None:
            raise no_right(link.server, link.last_reason) from None
        raise


async def ask_once(
    config: NatsConfig,
    ask: Callable[[NatsLink], Coroutine[Any, Any, T]],
    *,
    name: str,
    random: Random,
    what: str,
) -> T:
    """Return the result of `ask`, which is called with a separate link and retried for about 5 s.

    Raises NatsRefused or NatsUnreachable if all tries fail. `what` completes the message of NatsUnreachable.
    """
    problem: Exception | None = None
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            while True:
                try:
                    return await _over_a_link(config, ask, name=name, random=random)
                except TROUBLE as found:
                    problem = found
                    await asyncio.sleep(_RETRY_S)
    except TimeoutError:
        reason = "no answer in time" if problem is None else reason_of(problem)
        if isinstance(problem, NoResponders):
            raise no_jetstream(config.shown) from None
        raise NatsUnreachable(
            f"NATS at {config.shown} {what} within {CHECK_TIMEOUT_S:.0f} s: {reason}.",
            fix="check that the servers run and have elected a leader, or correct App(wake=...).",
        ) from None


async def _over_a_link(
    config: NatsConfig, ask: Callable[[NatsLink], Coroutine[Any, Any, T]], *, name: str, random: Random
) -> T:
    link = await NatsLink.open(config, name=name, random=random)
    orderly = False
    try:
        answer = await link.run_with(ask(link))
        orderly = True
    except NoResponders:
        if link.is_alone_without_jetstream:
            raise no_jetstream(link.server) from None
        raise
    except TimeoutError:
        if (
            link.last_reason is not None
        ):  # the server does not reply to requests that the user has no permission to make
            raise no_jetstream(link.server, link.last_reason) from None
        raise
    else:
        return answer
    finally:
        await link.close(orderly=orderly)


_MOST_PAGES: Final = 100
_RECHECK_S: Final = 1.0


async def find_stream_facts(plan: StreamPlan, config: NatsConfig) -> StreamFacts:
    """Return the facts about the stream of this plan. Raises NatsUnreachable or NatsRefused within about 5 s if the facts cannot be read."""
    what = f"did not describe stream {plan.stream!r}"
    return await ask_once(
        config, lambda link: _facts(link, plan), name="everbeat doctor", random=Random(), what=what
    )


async def _facts(link: NatsLink, plan: StreamPlan) -> StreamFacts:
    try:
        stream = await ask(link, f"STREAM.INFO.{plan.stream}")
        foreign = plan.foreign(stream["config"])
        if foreign is not None:
            raise of_stream(plan.stream, link.server, foreign)
        consumers = await _consumers(link, plan)
        stuck = _undeliverable(stream, consumers)
        if stuck:
            await asyncio.sleep(_RECHECK_S)  # the two replies describe different points in time
            stream = await ask(link, f"STREAM.INFO.{plan.stream}")
            consumers = await _consumers(link, plan)
            stuck = min(stuck, _undeliverable(stream, consumers))
    except ApiProblem as problem:
        if problem.err_code == NO_STREAM:
            return StreamFacts(server=link.server, stream=plan.stream, exists=False)
        if problem.may_pass:
            raise
        raise of_api(plan.stream, link.server, problem) from None
    return StreamFacts(
        server=link.server,
        stream=plan.stream,
        waiting=sum(each["num_pending"] for each in consumers),
        unended=sum(each["num_ack_pending"] for each in consumers),
        redelivered=sum(each["num_redelivered"] for each in consumers),
        published_at=_moment(stream["state"].get("last_ts")),
        bytes=stream["state"].get("bytes", 0),
        max_bytes=max(0, stream["config"].get("max_bytes", 0)) or None,
        undeliverable=stuck,
        foreign=tuple(
            f"{each['name']!r} (takes {each['config'].get('filter_subject') or 'all subjects'})"
            for each in consumers
            if not plan.is_own_consumer(each["config"])
        ),
        altered=tuple(
            f"{each['name']!r}: {', '.join(changed)}"
            for each in consumers
            if plan.is_own_consumer(each["config"]) and (changed := [*plan.altered(each)])
        ),
    )


def _undeliverable(stream: Mapping[str, Any], consumers: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of messages that no consumer will deliver and whose acknowledgement no consumer is awaiting."""
    known = sum(int(each["num_pending"] + each["num_ack_pending"]) for each in consumers)
    return max(0, int(stream["state"]["messages"]) - known)


async def _consumers(link: NatsLink, plan: StreamPlan) -> Sequence[Mapping[str, Any]]:
    """Return the consumers of the stream, one per queue."""
    found: list[Mapping[str, Any]] = []
    for _ in range(_MOST_PAGES):
        answer = await ask(link, f"CONSUMER.LIST.{plan.stream}", {"offset": len(found)})
        page: list[Mapping[str, Any]] = answer.get("consumers") or []
        found += page
        if not page or len(found) >= answer.get("total", 0):
            break
    return found


def _moment(text: str | None) -> datetime | None:
    """Parse a time from the server. Return None for the year 1, which means that no message was ever published."""
    moment = None if text is None else datetime.fromisoformat(text)
    return None if moment is None or moment.year == 1 else moment


NO_SEQUENCE: Final = 10043


class StoredMessages:
    """The messages of the stream. `keeper`, and every method that sends a request, raises ConnectionError while there is no link."""

    def __init__(self, plan: StreamPlan, keeper: Callable[[], StreamKeeper]) -> None:
        self._plan = plan
        self._keeper = keeper

    async def count(self) -> Mapping[str, int]:
        """Return the number of messages by queue subject."""
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
        """Return the subject of a queue's messages."""
        return self._plan.subject(queue)

    async def read(self, subject: str, *, first: int, limit: int, older_s: float) -> Sequence[Stored]:
        """Return up to `limit` messages, starting at place `first`.

        Stop before the first message that is younger than `older_s` seconds by the server's clock.
        """
        found: list[Stored] = []
        info = await self._ask(f"STREAM.INFO.{self._plan.stream}")
        now = None if info is None else _sent_at(info.get("ts"))
        while now is not None and len(found) < limit:
            answer = await self._ask(
                f"STREAM.MSG.GET.{self._plan.stream}", {"seq": first, "next_by_subj": subject}
            )
            if answer is None:
                break
            held = answer["message"]
            stored_at = _sent_at(held.get("time"))
            if stored_at is not None and (now - stored_at).total_seconds() < older_s:
                break
            found.append(Stored(place=held["seq"], message=decode(b64decode(held.get("data", "")))))
            first = held["seq"] + 1
        return found

    async def remove(self, subject: str, places: Sequence[int], *, before: int | None) -> None:
        """Remove the messages at these places. One request also removes all messages of the subject before the place `before`."""
        if before is not None:
            await self._ask(f"STREAM.PURGE.{self._plan.stream}", {"filter": subject, "seq": before})
        single = [place for place in places if before is None or place >= before]
        delete = f"STREAM.MSG.DELETE.{self._plan.stream}"
        await asyncio.gather(*(self._ask(delete, {"seq": place, "no_erase": True}) for place in single))

    async def is_wanted(self, queue: str) -> bool:
        """Return whether a worker is currently waiting for messages of this queue."""
        answer = await self._ask(f"CONSUMER.INFO.{self._plan.stream}.{self._plan.consumer(queue)}")
        return answer is not None and answer.get("num_waiting", 0) > 0

    async def _ask(self, subject: str, body: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        """Return the reply, or None if the requested object does not exist."""
        try:
            return await ask(self._keeper().link, subject, None if body is None else dict(body))
        except ApiProblem as problem:
            if problem.err_code in (NO_MESSAGE, NO_STREAM, NO_CONSUMER, NO_SEQUENCE):
                return None
            raise ConnectionError(str(problem)) from None
        except (LinkLost, NoResponders, TimeoutError) as problem:
            raise ConnectionError(reason_of(problem)) from None


def _sent_at(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)
