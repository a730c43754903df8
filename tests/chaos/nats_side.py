"""The NATS server of a run, the connections to it, and counts of its messages."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from everbeat import NatsConfig
from everbeat.nats.stream_plan import StreamPlan
from tests.chaos.clock import boot_s
from tests.chaos.evidence import Messages
from tests.chaos.line import Lines
from tests.chaos.nats_line import NatsLine
from tests.chaos.plan import THRESHOLD_S
from tests.nats_server import NatsServer, free_port

DRAINED_WITHIN_S: Final = 15.0
"""How long messages can stay in the stream or the outbox after the last task has finished, in seconds."""

# Rows of tasks that were sent while the clock was ahead become due when the clock reaches that time again.
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
"""A query that counts live workers that report no connection to NATS."""

_LOOK_EVERY_S: Final = 0.2
_QUEUE: Final = "default"


class NatsSide:
    """A running NATS server. A fault that affects the server holds `server_lock`."""

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
        """Open another line to the server."""
        port = self.server.port
        line = self._lines.add(lambda: NatsLine(port).open())
        self.lines.append(line)
        return line

    def do(self, act: Callable[[], None]) -> None:
        """Call a line's method in the event loop of the lines' thread."""
        self._lines.do(act)

    def stream(self) -> Mapping[str, Any] | None:
        """Return the server's information about the stream, or None if there is no stream or the server does not respond."""
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self._page}/jsz?consumers=true", timeout=1
            ) as page:
                detail = json.load(page)
        except (OSError, ValueError):
            return None
        streams = (
            each for one in detail.get("account_details") or () for each in one.get("stream_detail") or ()
        )
        return next((each for each in streams if each["name"] == self.plan.stream), None)

    async def pause(self) -> None:
        """Pause deliveries until `resume` is called, for at most a minute."""
        until = (datetime.now(UTC) + timedelta(minutes=1)).isoformat()
        await self._request(f"CONSUMER.PAUSE.{self.plan.stream}.{self.consumer}", {"pause_until": until})

    async def resume(self) -> None:
        """Resume deliveries."""
        await self._request(f"CONSUMER.PAUSE.{self.plan.stream}.{self.consumer}", {})

    async def remove_some(self, chosen: Callable[[], bool]) -> int:
        """Delete up to 500 of the oldest messages in the stream, selected by `chosen`. Return the number of deleted messages."""
        state = (await self._request(f"STREAM.INFO.{self.plan.stream}"))["state"]
        first, last = state["first_seq"], state["last_seq"]
        gone = 0
        async with self.server.connected() as client:
            for place in [place for place in range(first, min(last, first + 2_000) + 1) if chosen()][:500]:
                subject = f"$JS.API.STREAM.MSG.DELETE.{self.plan.stream}"
                answer = await client.request(subject, json.dumps({"seq": place}).encode(), timeout=5)
                gone += bool(json.loads(answer.data).get("success"))
        return gone

    async def _request(self, subject: str, body: dict[str, Any] | None = None) -> Mapping[str, Any]:
        found = await self.server.ask(subject, body)
        if "error" in found:
            raise KeyError(found["error"]["description"])
        return found

    def await_drained(self, outbox: Callable[[], int], away: Callable[[], int]) -> Messages:
        """Wait until the stream and the outbox are empty and every worker is connected. Return the last observation.

        `outbox` returns the number of due rows. `away` returns the number of live workers that report no connection to NATS.
        """
        began = boot_s()
        while True:
            rows, missing, stream = outbox(), away(), self.stream()
            held = -1 if stream is None else stream["state"]["messages"]
            drained_s = boot_s() - began
            if (rows, missing, held) == (0, 0, 0) or drained_s > DRAINED_WITHIN_S:
                break
            time.sleep(_LOOK_EVERY_S)  # the run polls from outside, as an operator would
        is_over = (rows, missing, held) == (0, 0, 0)
        return Messages(
            delivered=self._delivered,
            in_outbox=rows,
            in_stream=held,
            workers_away=missing,
            drained_after_s=drained_s if is_over else None,
        )

    def close(self) -> None:
        """Stop the server and delete its storage."""
        self._over.set()
        self._counting.join(5)
        self.server.close()

    def _count(self) -> None:
        """Count deliveries until the run is over.

        A consumer that is created again starts at 0. Deliveries between the last check and the old consumer's deletion are missed.
        """
        while not self._over.wait(_LOOK_EVERY_S):
            stream = self.stream()
            if stream is None:
                continue
            now = sum(each["delivered"]["consumer_seq"] for each in stream.get("consumer_detail") or ())
            self._delivered += now - self._last_delivered if now >= self._last_delivered else now
            self._last_delivered = now
