"""What a bench leaves at the user's NATS servers, taken away again.

What lives here: deleting the stream of a bench. What may not: streams of anybody else. Loaded only where NATS is measured, since it needs the client.
"""

from __future__ import annotations

import asyncio
from random import Random

from everbeat.wake.nats_check import ask_once
from everbeat.wake.nats_link import Link
from everbeat.wake.nats_problems import NO_STREAM, ApiProblem
from everbeat.wake.nats_stream import ask
from everbeat.wake.options import NatsConfig
from everbeat.wake.stream_plan import StreamPlan

_ANY_WAIT_S = 60.0  # the stream's name does not depend on it


def remove_stream(config: NatsConfig, schema: str) -> None:
    """Deletes the stream of this schema and what it holds. Raises a NatsError where that cannot be done."""
    stream = StreamPlan(schema, config, _ANY_WAIT_S).stream

    async def delete(link: Link) -> None:
        try:
            await ask(link, f"STREAM.DELETE.{stream}")
        except ApiProblem as problem:
            if problem.err_code != NO_STREAM:  # no worker came as far as making it
                raise

    asyncio.run(
        ask_once(
            config,
            delete,
            name="everbeat bench",
            random=Random(),
            what=f"did not delete stream {stream!r}",
        )
    )
