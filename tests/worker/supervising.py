"""Supervisions with their caretakers, and whole trees of real processes to be killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import psutil

from everbeat.config import RecoveryConfig
from everbeat.runtime.clock import SystemClock
from everbeat.runtime.events import EventBus
from everbeat.services.caretakers import Caretakers
from everbeat.store.session import Session
from everbeat.store.target import Target
from everbeat.worker.protocol import Hello
from everbeat.worker.supervision import Supervision

PROGRAM = Path(__file__).parent / "programs" / "supervisor.py"
FAST = {
    "runner_heartbeat_interval_ms": 1_000,
    "claimer_heartbeat_interval_ms": 1_000,
    "running_stale_threshold_ms": 2_000,
    "claimed_stale_threshold_ms": 2_000,
    "check_interval_ms": 1_000,
}
BY_AGE = FAST | {"detect_child_exit": False, "detect_session_loss": False, "startup_reconciliation": False}


def supervision(target: Target, config: RecoveryConfig, *, events: EventBus | None = None) -> Supervision:
    """A supervision that is cared for as in production."""

    def care(of: Supervision) -> Caretakers:
        return Caretakers(
            of.session, config, channel=target.channel, observer=of, states=of.states, holders=lambda: of.seats, identity=of.identity,
            open_spare=lambda: Session(target, f"{of.session_name} pruner"), events=of.events, clock=of.clock, random=of.random,
        )  # fmt: skip

    return Supervision(
        target, config, care=care, events=events or EventBus(), clock=SystemClock(), random=Random()
    )


def supervision_for(hello: Hello, *, events: EventBus) -> Supervision:
    """What a supervisor makes of its first child's Hello."""
    target = Target.parse(hello.url, schema=hello.schema)
    return supervision(target, RecoveryConfig.from_dict(hello.recovery), events=events)


class Tree:
    """A supervisor and everything under it, as processes."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log = log
        self._all = psutil.Process(process.pid)

    @property
    def pid(self) -> int:
        return self.process.pid

    def workers(self) -> list[int]:
        """The worker processes that run now."""
        pids = []
        for child in self._all.children():
            with suppress(psutil.NoSuchProcess):  # it may go while we look
                if child.status() != psutil.STATUS_ZOMBIE:
                    pids.append(child.pid)
        return pids

    def family(self) -> list[psutil.Process]:
        return [self._all, *self._all.children(recursive=True)]

    def signal_all(self, number: int) -> None:
        """The supervisor first: it must not see its children go."""
        for process in self.family():
            process.send_signal(number)

    def kill(self) -> None:
        self.signal_all(signal.SIGKILL)
        self.process.wait()

    def text(self) -> str:
        return self.log.read_text()

    def end(self) -> None:
        """Whatever is left of it, whatever state it is in."""
        if self.process.poll() is None:
            family = self.family()
            for process in family:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            self.process.wait()


@contextmanager
def tree(
    target: Target,
    log: Path,
    *flags: str,
    recovery: Mapping[str, Any] | None = None,
    **worker: Any,
) -> Iterator[Tree]:
    """A tree that is killed at the end, if it has not ended before."""
    settings = {"process_concurrency": 1, "thread_concurrency": 4} | worker
    arguments = [target.url, target.schema, json.dumps(dict(recovery or {})), json.dumps(settings), *flags]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, str(PROGRAM), *arguments],
            stdout=out,
            stderr=out,
            env=os.environ | {"PYTHONFAULTHANDLER": "1"},
        )
    party = Tree(process, log)
    try:
        yield party
    finally:
        party.end()


def until(condition: Callable[[], object], *, timeout_s: float = 60.0, what: str = "") -> float:
    """Waits for something of the world outside; answers how long it took, in seconds."""
    began = time.monotonic()
    while not condition():
        waited = time.monotonic() - began
        assert waited < timeout_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.005)  # other processes and the server tell us nothing
    return time.monotonic() - began
