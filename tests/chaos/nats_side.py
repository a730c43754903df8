"""The NATS server of a run, the lines that lead to it, and what went through it.

What lives here: the server, and counting from outside. What may not: how it is struck (`nats_faults`), and judging.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from everbeat import NatsConfig
from everbeat.wake.stream_plan import StreamPlan
from tests.chaos.clock import boot_s
from tests.chaos.evidence import Messages
from tests.chaos.line import Lines
from tests.chaos.nats_line import NatsLine
from tests.chaos.plan import THRESHOLD_S
from tests.nats_server import NatsServer, free_port

DRAINED_WITHIN_S: Final = 15.0
"""So long after the last task has ended a message of it may lie in the stream or in the outbox."""

# Of tasks that were sent while the clock was ahead rows are due only when it is there again.
IN_OUTBOX: Final = (
    "select count(*) from {0}.message_outbox where place is not null or due_at <= statement_timestamp()"
)
AWAY: Final = """
    select count(*) from {0}.workers w
    cross join lateral (
        select s.messages from {0}.worker_states s where s.worker_id = w.id order by s.id desc limit 1
    ) s
    where w.ended_at is null and s.messages ->> 'up' = 'false'
"""
"""Living workers that say they hear nothing of NATS."""

_LOOK_EVERY_S: Final = 0.2
_QUEUE: Final = "default"


class NatsSide:
    """A running server. `server_lock` is held by who strikes it."""

    def __init__(self, lines: Lines, *, schema: str) -> None:
        self._lines = lines
        self._page = free_port()
        self.server = NatsServer(extra=f'http: "127.0.0.1:{self._page}"')
        self.server.start()
        config = NatsConfig(servers=[self.server.url])
        self.plan = StreamPlan(schema, config, THRESHOLD_S + 2.0)
        self.subject = self.plan.subject(_QUEUE)
        self.consumer = self.plan.consumer(_QUEUE)
        self.server_lock = threading.Lock()
        self.lines: list[NatsLine] = []
        self._delivered = 0
        self._last_delivered = 0
        self._over = threading.Event()
        self._counting = threading.Thread(target=self._count, daemon=True, name="NATS counters")
        self._counting.start()

    def open_line(self) -> NatsLine:
        """One more line to the server."""
        port = self.server.port
        line = self._lines.add(lambda: NatsLine(port).open())
        self.lines.append(line)
        return line

    def do(self, act: Callable[[], None]) -> None:
        """Does something to a line, in its loop."""
        self._lines.do(act)

    def stream(self) -> Mapping[str, Any] | None:
        """What the server says of the stream; None where there is none, or no server that answers."""
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self._page}/jsz?consumers=true", timeout=1
            ) as page:
                told = json.load(page)
        except (OSError, ValueError):
            return None
        streams = (
            each for one in told.get("account_details") or () for each in one.get("stream_detail") or ()
        )
        return next((each for each in streams if each["name"] == self.plan.stream), None)

    async def pause(self) -> None:
        """Nothing is delivered until `resume`, or for a minute at most."""
        until = (datetime.now(UTC) + timedelta(minutes=1)).isoformat()
        await self._told(f"CONSUMER.PAUSE.{self.plan.stream}.{self.consumer}", {"pause_until": until})

    async def resume(self) -> None:
        """Deliveries go on."""
        await self._told(f"CONSUMER.PAUSE.{self.plan.stream}.{self.consumer}", {})

    async def remove_some(self, chosen: Callable[[], bool]) -> int:
        """Deletes messages that lie in the stream, the oldest first, 500 at most; answers how many."""
        state = (await self._told(f"STREAM.INFO.{self.plan.stream}"))["state"]
        first, last = state["first_seq"], state["last_seq"]
        gone = 0
        async with self.server.connected() as client:
            for place in [place for place in range(first, min(last, first + 2_000) + 1) if chosen()][:500]:
                subject = f"$JS.API.STREAM.MSG.DELETE.{self.plan.stream}"
                answer = await client.request(subject, json.dumps({"seq": place}).encode(), timeout=5)
                gone += bool(json.loads(answer.data).get("success"))
        return gone

    async def _told(self, subject: str, body: dict[str, Any] | None = None) -> Mapping[str, Any]:
        found = await self.server.ask(subject, body)
        if "error" in found:
            raise KeyError(found["error"]["description"])
        return found

    def await_drained(self, outbox: Callable[[], int], away: Callable[[], int]) -> Messages:
        """Waits until nothing of this run's tasks is left in the stream and the outbox and no worker is without NATS; answers what was seen last.

        `outbox` counts rows that are due, `away` living workers that say they hear nothing of NATS.
        """
        began = boot_s()
        while True:
            rows, missing, stream = outbox(), away(), self.stream()
            held = -1 if stream is None else stream["state"]["messages"]
            drained_s = boot_s() - began
            if (rows, missing, held) == (0, 0, 0) or drained_s > DRAINED_WITHIN_S:
                break
            time.sleep(_LOOK_EVERY_S)  # the run looks from outside, as an operator would
        is_over = (rows, missing, held) == (0, 0, 0)
        return Messages(
            delivered=self._delivered,
            in_outbox=rows,
            in_stream=held,
            workers_away=missing,
            drained_after_s=drained_s if is_over else None,
        )

    def close(self) -> None:
        """Ends the server and forgets its store."""
        self._over.set()
        self._counting.join(5)
        self.server.close()

    def _count(self) -> None:
        """A consumer that was made anew counts from 0; what it counted between two looks and its end is not seen."""
        while not self._over.wait(_LOOK_EVERY_S):
            stream = self.stream()
            if stream is None:
                continue
            now = sum(each["delivered"]["consumer_seq"] for each in stream.get("consumer_detail") or ())
            self._delivered += now - self._last_delivered if now >= self._last_delivered else now
            self._last_delivered = now
