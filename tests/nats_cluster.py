"""Three real NATS servers with common streams."""

from __future__ import annotations

import asyncio
from typing import Self

import nats

from tests.nats_server import READY_S, NatsServer, free_port


class NatsCluster:
    """Three servers with common streams. Use it in a `with`, then await `ready()`."""

    def __init__(self) -> None:
        routes = [free_port() for _ in range(3)]
        listed = ", ".join(f"nats://127.0.0.1:{port}" for port in routes)
        self.nodes = [
            NatsServer(
                name=f"node{number}",
                extra=f'cluster {{ name: "tests", listen: "127.0.0.1:{port}", routes: [ {listed} ] }}',
            )
            for number, port in enumerate(routes)
        ]

    @property
    def url(self) -> str:
        return ",".join(node.url for node in self.nodes)

    @property
    def running(self) -> list[NatsServer]:
        return [node for node in self.nodes if node.process is not None]

    def __enter__(self) -> Self:
        try:
            for event in [node.begin() for node in self.nodes]:
                assert event.wait(READY_S), "a node of the cluster is not ready"
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for node in self.nodes:
            node.close()

    async def ready(self) -> None:
        """Wait until a stream with three replicas can be created; it is deleted again."""
        async with asyncio.timeout(READY_S):
            while True:
                try:
                    await self.nodes[0].add_stream("READY", ["ready"], num_replicas=3)
                    await self.nodes[0].delete_stream("READY")
                    return
                except (nats.errors.Error, OSError):
                    await asyncio.sleep(0.1)  # the election of a leader sends no event

    async def leader(self, stream: str) -> NatsServer:
        """Return the node that leads a stream."""
        async with asyncio.timeout(READY_S):
            while True:
                found = await self.running[0].ask(f"STREAM.INFO.{stream}")
                name = (found.get("cluster") or {}).get("leader")
                for node in self.running:
                    if node.name == name:
                        return node
                await asyncio.sleep(0.1)  # the election of a leader sends no event

    async def kill_leader(self, stream: str) -> NatsServer:
        """Kill the node that leads a stream and return it."""
        leader = await self.leader(stream)
        leader.kill()
        return leader
