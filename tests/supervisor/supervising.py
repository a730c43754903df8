"""Start supervisors with their services, and whole trees of real processes for tests to kill."""

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
from typing import Any

import psutil

from everbeat.config import RecoveryConfig
from everbeat.protocol import Hello
from everbeat.runtime.environment import ProcessEnvironment
from everbeat.runtime.events import EventBus
from everbeat.store.target import Target
from everbeat.supervisor.registration import Supervision

PROGRAM = Path(__file__).parents[1] / "worker" / "programs" / "supervisor.py"
FAST = {
    "runner_heartbeat_interval_ms": 1_000,
    "claimer_heartbeat_interval_ms": 1_000,
    "running_stale_threshold_ms": 2_000,
    "claimed_stale_threshold_ms": 2_000,
    "check_interval_ms": 1_000,
}
BY_AGE = FAST | {"detect_child_exit": False, "detect_session_loss": False, "startup_reconciliation": False}


def supervision(target: Target, config: RecoveryConfig, *, events: EventBus | None = None) -> Supervision:
    """Return a supervision with its services, as in production."""
    return Supervision(target, config, environment=ProcessEnvironment(events=events or EventBus()))


def supervision_for(hello: Hello, *, events: EventBus) -> Supervision:
    """Return the supervision for the database that a worker process named."""
    target = Target.parse(hello.url, schema=hello.schema)
    return supervision(target, RecoveryConfig.from_dict(hello.recovery), events=events)


class Tree:
    """A supervisor and all its child processes."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log = log
        self._all = psutil.Process(process.pid)

    @property
    def pid(self) -> int:
        return self.process.pid

    def workers(self) -> list[int]:
        """Return the pids of the worker processes that run now."""
        pids = []
        for child in self._all.children():
            with suppress(psutil.NoSuchProcess):  # it might end meanwhile
                if child.status() != psutil.STATUS_ZOMBIE:
                    pids.append(child.pid)
        return pids

    def family(self) -> list[psutil.Process]:
        return [self._all, *self._all.children(recursive=True)]

    def signal_all(self, number: int) -> None:
        """Send the signal to the supervisor first, so that it does not see its children end."""
        for process in self.family():
            process.send_signal(number)

    def kill(self) -> None:
        self.signal_all(signal.SIGKILL)
        self.process.wait()

    def text(self) -> str:
        return self.log.read_text()

    def end(self) -> None:
        """Kill all processes of the tree that are left, in any state."""
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
    """Run a tree and kill it at the end, if it has not ended before."""
    settings = {"process_concurrency": 1, "thread_concurrency": 4} | worker
    arguments = [target.url, target.schema, json.dumps(dict(recovery or {})), json.dumps(settings), *flags]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, str(PROGRAM), *arguments],
            stdout=out,
            stderr=out,
            env=os.environ | {"PYTHONFAULTHANDLER": "1"},
        )
    running_tree = Tree(process, log)
    try:
        yield running_tree
    finally:
        running_tree.end()


def until(condition: Callable[[], object], *, timeout_s: float = 60.0, what: str = "") -> float:
    """Wait until the condition is true; return how long it took, in seconds."""
    began = time.monotonic()
    while not condition():
        waited = time.monotonic() - began
        assert waited < timeout_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.005)  # other processes and the server send no event
    return time.monotonic() - began
