"""What a NATS server says of the stream, asked once over a link of its own; nothing is made or changed.

What lives here: the look. What may not: judging what it sees.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime
from random import Random
from typing import Any, Final

from everbeat.domain.nats_checks import StreamFacts
from everbeat.wake.nats_check import ask_once
from everbeat.wake.nats_link import Link
from everbeat.wake.nats_problems import NO_STREAM, ApiProblem, of_api, of_stream
from everbeat.wake.nats_stream import ask
from everbeat.wake.options import NatsConfig
from everbeat.wake.stream_plan import StreamPlan

_MOST_PAGES: Final = 100
_LOOK_AGAIN_S: Final = 1.0


async def look(plan: StreamPlan, config: NatsConfig) -> StreamFacts:
    """The stream of this plan as it is; raises NatsUnreachable or NatsRefused, after about 5 s at the latest."""
    what = f"said nothing of stream {plan.stream!r}"
    return await ask_once(
        config, lambda link: _facts(link, plan), name="everbeat doctor", random=Random(), what=what
    )


async def _facts(link: Link, plan: StreamPlan) -> StreamFacts:
    try:
        stream = await ask(link, f"STREAM.INFO.{plan.stream}")
        foreign = plan.foreign(stream["config"])
        if foreign is not None:
            raise of_stream(plan.stream, link.server, foreign)
        consumers = await _consumers(link, plan)
        stuck = _undeliverable(stream, consumers)
        if stuck:
            await asyncio.sleep(_LOOK_AGAIN_S)  # the two answers are of two moments
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
    """Count the messages that no consumer has to deliver or waits to be ended."""
    known = sum(int(each["num_pending"] + each["num_ack_pending"]) for each in consumers)
    return max(0, int(stream["state"]["messages"]) - known)


async def _consumers(link: Link, plan: StreamPlan) -> Sequence[Mapping[str, Any]]:
    """One for each queue."""
    found: list[Mapping[str, Any]] = []
    for _ in range(_MOST_PAGES):
        answer = await ask(link, f"CONSUMER.LIST.{plan.stream}", {"offset": len(found)})
        page: list[Mapping[str, Any]] = answer.get("consumers") or []
        found += page
        if not page or len(found) >= answer.get("total", 0):
            break
    return found


def _moment(text: str | None) -> datetime | None:
    """The server's time; None where nothing ever came, which it says as the year 1."""
    moment = None if text is None else datetime.fromisoformat(text)
    return None if moment is None or moment.year == 1 else moment
