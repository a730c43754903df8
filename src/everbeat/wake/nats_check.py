"""Whether the NATS servers and the stream can be used at all, asked once, before anything relies on them.

What lives here: the check. What may not: staying connected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any, Final, TypeVar

from everbeat.errors import NatsUnreachable
from everbeat.wake.nats_link import Link, NoResponders, reason_of
from everbeat.wake.nats_problems import no_jetstream, no_right
from everbeat.wake.nats_stream import TROUBLE, StreamKeeper
from everbeat.wake.options import NatsConfig
from everbeat.wake.stream_plan import StreamPlan

CHECK_TIMEOUT_S: Final = 5.0

T = TypeVar("T")
_RETRY_S: Final = 0.25
_RIGHT_S: Final = 2.0


async def check(plan: StreamPlan, config: NatsConfig) -> None:
    """The stream is there, or could be made; raises NatsUnreachable or NatsRefused, after about 5 s at the latest."""
    random = Random()

    async def ensure(link: Link) -> None:
        await StreamKeeper(link, plan, random).ensure(())
        await _try_to_publish(link, plan)

    await ask_once(
        config, ensure, name="everbeat check", random=random, what=f"did not get stream {plan.stream!r} ready"
    )


async def _try_to_publish(link: Link, plan: StreamPlan) -> None:
    """Raises NatsRefused where the user may not publish, which the server answers to nobody; nothing is stored: no stream is called so."""
    try:
        async with asyncio.timeout(_RIGHT_S):
            await link.expect(plan.subject("default"), b"", headers={"Nats-Expected-Stream": "none"})
    except TimeoutError:
        if link.last_reason is not None:
            raise no_right(link.server, link.last_reason) from None
        raise


async def ask_once(
    config: NatsConfig, ask: Callable[[Link], Coroutine[Any, Any, T]], *, name: str, random: Random, what: str
) -> T:
    """What `ask` answers over a link of its own, tried again for about 5 s; raises NatsUnreachable (it `what`) or NatsRefused."""
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
            fix="see whether the servers are up and have elected a leader, or correct App(wake=...).",
        ) from None


async def _over_a_link(
    config: NatsConfig, ask: Callable[[Link], Coroutine[Any, Any, T]], *, name: str, random: Random
) -> T:
    link = await Link.open(config, name=name, random=random)
    orderly = False
    try:
        answer = await link.during(ask(link))
        orderly = True
    except NoResponders:
        if link.is_alone_without_jetstream:
            raise no_jetstream(link.server) from None
        raise
    except TimeoutError:
        if link.last_reason is not None:  # what a user may not do is not answered
            raise no_jetstream(link.server, link.last_reason) from None
        raise
    else:
        return answer
    finally:
        await link.close(orderly=orderly)
