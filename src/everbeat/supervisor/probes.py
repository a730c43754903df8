"""Probes of a supervisor, for Kubernetes, systemd and others: served by a thread that does not depend on the event loop."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import MutableMapping
from concurrent.futures import Future
from errno import EISDIR
from importlib import import_module
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Final, Self

import msgspec
from msgspec.structs import replace

from everbeat.domain.metrics.text import CONTENT_TYPE
from everbeat.domain.probes import ProbeVerdict, SupervisorFacts, liveness, readiness, startup
from everbeat.errors import ConfigurationError, Problem
from everbeat.runtime.http_server import JSON, HttpAnswer, HttpServer, Responder, listen, shown_address
from everbeat.runtime.service_manager import ServiceManager

if TYPE_CHECKING:
    from everbeat.supervisor.metrics import ProcessMetrics
    from everbeat.supervisor.supervisor import Supervisor

_SAMPLE_EVERY_S: Final = 0.25
_ACT_EVERY_S: Final = 1.0
_SECOND_LOOK_S: Final = 1.0
"""How long a probe waits for the event loop before it reports that the loop stands still: a process that was suspended has just resumed."""
_LOOK_EVERY_S: Final = 0.05
_LOOP_WITHIN_S: Final = 2.0
_WATCHDOG_SHARE: Final = 3
_UNKNOWN_INTERVAL_S: Final = 30.0
_STOPPING: Final = ("STOPPING=1", "STATUS=Draining.")
_log = logging.getLogger("everbeat.supervisor")


class Probes:
    """Answers probes about a supervisor from a thread, from what its event loop last reported."""

    def __init__(
        self, *, listening: list[socket.socket], file: Path | None, manager: ServiceManager | None
    ) -> None:
        self._facts = SupervisorFacts(at=monotonic(), has_loop=False)
        self._file = file
        self._manager = manager
        self._told: set[str] = set()
        self._is_file_broken = False
        every_s = _ACT_EVERY_S
        if manager is not None and manager.watchdog_s is not None:
            every_s = min(every_s, manager.watchdog_s / _WATCHDOG_SHARE)
        acts = file is not None or manager is not None
        self.routes: dict[str, Responder] = {
            "/livez": lambda: _answer(self.liveness()),
            "/readyz": lambda: _answer(readiness(self._facts, now=monotonic())),
            "/startupz": lambda: _answer(startup(self._facts)),
        }
        self.routes["/metrics"] = self._scraped
        self._loop: asyncio.AbstractEventLoop | None = None
        self._metrics: ProcessMetrics | None = None
        self._listening = listening
        self._acts = (self._act, every_s) if acts else (None, None)
        self._server: HttpServer | None = None

    @classmethod
    def open(cls, *, address: str | None, file: str | None, environment: MutableMapping[str, str]) -> Self:
        """Open what serves the probes, before any process starts. Raises ConfigurationError if something cannot be used.

        `address` is where HTTP is served, and `file` is touched while the supervisor is alive. The environment names systemd's socket.
        """
        touched = None if file is None else _touched(file)
        listening = [] if address is None else listen(address, subject="--probe")
        return cls(listening=listening, file=touched, manager=ServiceManager.take(environment))

    def start(self) -> None:
        """Start the thread."""
        act, every_s = self._acts
        self._server = HttpServer(
            self._listening, self.routes, name="everbeat-probes", act=act, every_s=every_s
        )
        self._server.start()
        for each in self._listening:
            _log.info("probes_listening address=%s", shown_address(each))

    async def watch(self, supervisor: Supervisor, *, version: str) -> None:
        """Report the state of a supervisor to the thread until this coroutine is cancelled. `version` is that of everbeat."""
        beats, beat_at = -1, None
        # This module is loaded before the first worker process starts, and the code of supervisors after it.
        module = import_module("everbeat.supervisor.metrics")
        self._metrics = module.ProcessMetrics(supervisor, supervisor.environment.events, version=version)
        self._loop = asyncio.get_running_loop()
        try:
            while True:
                now, supervision = monotonic(), supervisor.supervision
                if supervision is not None and beats < 0:
                    self._metrics.attach(supervision)
                if supervision is not None and supervision.heartbeat.acknowledged != beats:
                    beats, beat_at = supervision.heartbeat.acknowledged, now
                before, self._facts = self._facts, _facts_of(supervisor, at=now, beat_at=beat_at)
                if _changes(before) != _changes(self._facts) and self._server is not None:
                    self._server.wake()
                await asyncio.sleep(_SAMPLE_EVERY_S)
        finally:
            self._facts = replace(self._facts, has_ended=True)
            self._loop = None
            self._metrics.close()

    def liveness(self) -> ProbeVerdict:
        """Return whether the supervisor is alive, after a second look if its event loop seems to stand still. Called in the thread."""
        deadline = monotonic() + _SECOND_LOOK_S
        while True:
            now = monotonic()
            verdict = liveness(self._facts, now=now)
            if verdict.ok or now >= deadline:
                return verdict
            sleep(_LOOK_EVERY_S)

    def _scraped(self) -> HttpAnswer:
        """Return the metrics as the event loop sees them now. Called in the thread, which waits for the loop for a moment."""
        loop, metrics = self._loop, self._metrics
        text: Future[str] = Future()

        def read() -> None:
            try:
                text.set_result("" if metrics is None else metrics.read().text())
            except Exception as problem:  # noqa: BLE001 - raised in the thread
                text.set_exception(problem)

        try:
            if loop is None:
                raise TimeoutError
            loop.call_soon_threadsafe(read)
            return HttpAnswer(200, text.result(_LOOP_WITHIN_S), CONTENT_TYPE)
        except (TimeoutError, RuntimeError):  # the loop stands still or is closed
            return HttpAnswer(503, "The supervisor's event loop does not respond.\n")

    def close(self) -> None:
        """Stop the thread, close the port, and remove the file."""
        if self._server is not None:
            self._server.close()
        for each in self._listening:
            each.close()
        self._tell(*_STOPPING)  # a tree without work stops before the thread notices
        if self._file is not None:
            try:
                self._file.unlink(missing_ok=True)
            except OSError as problem:  # for example, its folder can no longer be written
                self._report_file(self._file, problem)

    def _act(self) -> None:
        """Touch the file and notify systemd, as far as the supervisor is alive."""
        facts = self._facts
        is_alive = self.liveness().ok
        if self._file is not None and is_alive:
            self._touch(self._file)
        if self._manager is None:
            return
        if facts.was_ever_ready:
            self._tell("READY=1", "STATUS=Worker processes are running.")
        if facts.is_draining or facts.has_ended:
            self._tell(*_STOPPING)
        if is_alive and self._manager.watchdog_s is not None:
            self._manager.notify("WATCHDOG=1")

    def _tell(self, *lines: str) -> None:
        if self._manager is not None and lines[0] not in self._told:
            self._told.add(lines[0])
            self._manager.notify(*lines)

    def _touch(self, file: Path) -> None:
        try:
            file.touch()
        except OSError as problem:
            self._report_file(file, problem)
        else:
            self._is_file_broken = False

    def _report_file(self, file: Path, problem: OSError) -> None:
        if not self._is_file_broken:
            _log.warning("probe_file_failed file=%s problem=%r", file, str(problem))
        self._is_file_broken = True


def _facts_of(supervisor: Supervisor, *, at: float, beat_at: float | None) -> SupervisorFacts:
    supervision = supervisor.supervision
    ready, processes = supervisor.process_counts
    return SupervisorFacts(
        at=at,
        beat_interval_s=_UNKNOWN_INTERVAL_S
        if supervision is None
        else supervision.config.beat_interval_ms / 1_000,
        beat_at=beat_at,
        has_outage=supervision is not None and supervision.outages.reason is not None,
        is_draining=supervisor.is_stopping,
        was_ever_ready=supervisor.was_ever_ready,
        ready=ready,
        processes=processes,
    )


def _changes(facts: SupervisorFacts) -> tuple[bool, bool]:
    """Return the facts of which systemd is notified at once."""
    return facts.was_ever_ready, facts.is_draining


def _answer(verdict: ProbeVerdict) -> HttpAnswer:
    return HttpAnswer(200 if verdict.ok else 503, msgspec.json.encode(verdict).decode() + "\n", JSON)


def _touched(text: str) -> Path:
    file = Path(text)
    try:
        if file.is_dir():  # it can be touched, but not removed
            raise IsADirectoryError(EISDIR, os.strerror(EISDIR))
        file.touch()
    except (OSError, ValueError) as problem:
        raise ConfigurationError(
            [
                Problem(
                    code="UNUSABLE",
                    subject="--probe-file",
                    value=repr(text),
                    rule=f"must be a file that this process can write ({getattr(problem, 'strerror', None) or problem})",
                    fix="name a file in an existing folder that this user can write, such as /tmp/everbeat-alive",
                )
            ]
        ) from None
    return file
