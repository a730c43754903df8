"""NATS in the demo: which server tells the workers of tasks, what it counted, and that it is killed, too.

What lives here: the server's part. What may not: the order of things (`director`), and the judgement.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from everbeat.cli.demo.evidence import Messages
from everbeat.cli.nats_server import NatsServer, StreamCounters
from everbeat.runtime.clock import Clock
from everbeat.wake.options import NatsConfig
from everbeat.wake.stream_plan import StreamPlan

_ANY_WAIT_S: Final = 60.0  # the stream's name does not depend on it


class Post:
    """The server of one demo and what went through it, from `begin` on; `close` ends it."""

    def __init__(self, folder: Path, *, schema: str, clock: Clock) -> None:
        self._server = NatsServer(folder)
        self._stream = StreamPlan(schema, NatsConfig(servers=[self.url]), _ANY_WAIT_S).stream
        self._clock = clock
        self._first = 0
        self._delivered_before = 0
        self._away_since = 0.0
        self._away_s = 0.0
        self._ended_meanwhile = 0
        self._at_the_return: StreamCounters | None = None
        self._last: StreamCounters | None = None

    @property
    def url(self) -> str:
        """Where the workers find it."""
        return self._server.url

    @property
    def away_s(self) -> float:
        """For how long it has been away."""
        return self._clock.monotonic() - self._away_since

    def start(self) -> None:
        """Starts the server."""
        self._server.start()

    def begin(self) -> None:
        """Counts from now on: the workers have made their stream, and nothing has been sent."""
        self._first = self._look().last

    def kill(self) -> int:
        """Kills the server; answers its process id."""
        self._last = self._look()
        self._delivered_before = self._last.delivered
        pid = self._server.pid
        self._server.kill()
        self._away_since = self._clock.monotonic()
        return pid

    def restart(self, *, ended_meanwhile: int) -> None:
        """Starts the server again, with what it had stored."""
        self._away_s = self.away_s
        self._ended_meanwhile = ended_meanwhile
        self._server.start()
        self._at_the_return = self._look()

    def is_wanted(self) -> bool:
        """Whether a worker asks for messages."""
        return self._look().wanted > 0

    def is_empty(self) -> bool:
        """Whether every message has been acknowledged."""
        return self._look().held == 0

    def told(self) -> Messages:
        """What went through it."""
        last = self._last if self._server.pid == 0 else self._look()
        if last is None:
            return Messages(
                published=0, delivered=0, delivered_after=0, left=0, away_s=0.0, ended_meanwhile=0
            )
        since = 0 if self._at_the_return is None else last.delivered - self._at_the_return.delivered
        before = last.delivered if self._at_the_return is None else self._delivered_before
        return Messages(
            published=last.last - self._first,
            delivered=before + since,
            delivered_after=since,
            left=last.held,
            away_s=self._away_s,
            ended_meanwhile=self._ended_meanwhile,
        )

    def close(self) -> None:
        """Ends the server."""
        self._server.close()

    def _look(self) -> StreamCounters:
        # Consumers that nobody has asked of yet are none: there is a stream from the first worker on.
        found = self._server.counters(self._stream)
        return StreamCounters(last=0, held=0, delivered=0, wanted=0) if found is None else found
