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
from everbeat.errors import NatsUnreachable
from everbeat.wake.nats_link import Link, NoResponders, first_of, reason_of
from everbeat.wake.nats_problems import NO_STREAM, ApiProblem, no_jetstream, of_api, of_stream
from everbeat.wake.nats_stream import TROUBLE, ask
from everbeat.wake.options import NatsConfig
from everbeat.wake.stream_plan import StreamPlan

LOOK_TIMEOUT_S: Final = 5.0

_RETRY_S: Final = 0.25
_MOST_PAGES: Final = 100


async def look(plan: StreamPlan, config: NatsConfig) -> StreamFacts:
    """The stream of this plan as it is; raises NatsUnreachable or NatsRefused, after about 5 s at the latest."""
    random = Random()
    problem: Exception | None = None
    try:
        async with asyncio.timeout(LOOK_TIMEOUT_S):
            while True:
                try:
                    return await _look_once(plan, config, random)
                except TROUBLE as found:
                    problem = found
                    await asyncio.sleep(_RETRY_S)
    except TimeoutError:
        if isinstance(problem, NoResponders):
            raise no_jetstream(config.shown) from None
        reason = "no answer in time" if problem is None else reason_of(problem)
        raise NatsUnreachable(
            f"NATS at {config.shown} said nothing of stream {plan.stream!r} within {LOOK_TIMEOUT_S:.0f} s: {reason}.",
            fix="see whether the servers are up and have elected a leader, or correct App(wake=...).",
        ) from None


async def _look_once(plan: StreamPlan, config: NatsConfig, random: Random) -> StreamFacts:
    link = await Link.open(config, name="everbeat doctor", random=random)
    try:
        async with asyncio.TaskGroup() as group:
            carrying = group.create_task(link.carry(lambda: None))
            facts = await _facts(link, plan)
            carrying.cancel()
    except BaseExceptionGroup as ended:
        problem = first_of(ended)
        if isinstance(problem, NoResponders) and link.is_alone_without_jetstream:
            raise no_jetstream(link.server) from None
        if isinstance(problem, TimeoutError) and link.last_reason is not None:
            raise no_jetstream(link.server, link.last_reason) from None
        raise problem from None
    finally:
        await link.close(orderly=False)
    return facts


async def _facts(link: Link, plan: StreamPlan) -> StreamFacts:
    try:
        stream = await ask(link, f"STREAM.INFO.{plan.stream}")
        foreign = plan.foreign(stream["config"])
        if foreign is not None:
            raise of_stream(plan.stream, link.server, foreign)
        consumers = await _consumers(link, plan)
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
    )


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
