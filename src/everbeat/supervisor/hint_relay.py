"""Passes hints from one LISTEN session on to all worker processes of a tree."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from random import Random
from typing import Any, Final, Self

from everbeat.hints import HintSource
from everbeat.hints.postgres import PostgresHintSource
from everbeat.hints.topics import Everything, Hint, encode
from everbeat.protocol import HintsArrive
from everbeat.store.target import Target
from everbeat.supervisor.processes import WorkerChild

MOST_AT_ONCE: Final = 100
"""If more different hints than this arrive at once, `Everything` replaces them."""


class HintRelay:
    """Passes hints from `source` on to `children`, so that these worker processes need no LISTEN sessions.

    `WorkerChild.send_hints` limits how many bytes wait for a process that does not read.
    """

    def __init__(self, source: HintSource, children: Collection[WorkerChild]) -> None:
        self._source = source
        self._children = children
        self._arrive = False
        self._pending: dict[str, None] = {}

    @classmethod
    def from_database(
        cls, target: Target, *, session_name: str, children: Collection[WorkerChild], random: Random
    ) -> Self:
        """Return a relay of the schema's hints, which are read in a session with this name."""

        def connect() -> Any:
            return target.aconnect(session_name)

        return cls(PostgresHintSource(connect, target.channel, ignores_ends=True, random=random), children)

    async def run(self) -> None:
        """Pass on hints until cancelled."""
        await self._source.run(self._on_hint, self._on_state)

    def join(self, child: WorkerChild) -> None:
        """Notify a process that has just received its Welcome whether hints arrive."""
        child.send(HintsArrive(self._arrive))

    def _on_state(self, arrive: bool) -> None:
        self._arrive = arrive
        for child in self._children:
            if child.is_welcome:
                self.join(child)

    def _on_hint(self, hint: Hint) -> None:
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._pass_on)
        self._pending.update(dict.fromkeys(encode(hint)))
        if len(self._pending) > MOST_AT_ONCE:
            self._pending = dict.fromkeys(encode(Everything()))

    def _pass_on(self) -> None:
        payloads = list(self._pending)
        self._pending.clear()
        for child in self._children:
            if child.is_welcome:
                child.send_hints(payloads)
