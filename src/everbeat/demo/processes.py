"""The processes that the demo starts: worker trees, an independent count of the same files, and a NATS server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from signal import Signals
from typing import Final

from everbeat.cli.nats_server import NatsServer, StreamCounters
from everbeat.cli.own_tree import start_own_tree
from everbeat.demo import source_files
from everbeat.demo.source_files import Counts, total
from everbeat.demo.verification import MessageCounts
from everbeat.nats.options import NatsConfig
from everbeat.nats.stream_plan import StreamPlan
from everbeat.runtime.clock import Clock

LOCATOR: Final = "everbeat.demo.tasks:app"
_GRACE_S: Final = 10.0
_TAIL: Final = 2_000
_MINUTE_S: Final = 58.0
_PATIENCE_S: Final = 14.0  # the workers had priority until they exited; now the count can finish
_ANY_WAIT_S: Final = 60.0  # the stream's name does not depend on it


class Tree:
    """A supervisor with its worker and task processes. The tree logs to a file."""

    def __init__(self, number: int, *, environment: Mapping[str, str], folder: Path) -> None:
        self.number = number
        self.log = folder / f"tree-{number}.log"
        with self.log.open("wb") as output:
            self._process = start_own_tree(LOCATOR, environment=environment, output=output)

    @property
    def pid(self) -> int:
        """Return the supervisor's process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Return the supervisor's exit code, or None while the supervisor is running."""
        return self._process.poll()

    def holds(self, pid: int) -> bool:
        """Return whether a process belongs to this tree, that is, to the session that the supervisor leads."""
        try:
            return self.exit_code is None and os.getsid(pid) == self.pid
        except OSError:  # the process has exited, or belongs to another user
            return False

    def signal(self, pid: int, number: Signals) -> None:
        """Send a signal to one process if it belongs to this tree."""
        if self.holds(pid):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def signal_all(self, number: Signals) -> None:
        """Send a signal to every process. The supervisor is signaled first, because it must not see its children die."""
        members = [pid for pid in _processes() if pid != self.pid and self.holds(pid)]
        for pid in [self.pid, *members] if self.exit_code is None else []:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        """Kill every process at once, and wait until the supervisor has exited."""
        self.signal_all(Signals.SIGSTOP)  # no process may see another one die
        self.signal_all(Signals.SIGKILL)
        self._process.wait(timeout=_GRACE_S)

    def stop(self) -> None:
        """Ask the supervisor to shut down, and return immediately. Call `wait` to wait for the exit."""
        if self.exit_code is None:
            self._process.terminate()

    def wait(self) -> int:
        """Wait for the supervisor and return its exit code. The tree is killed if the supervisor does not exit in time."""
        try:
            return self._process.wait(timeout=_GRACE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return self._process.wait()

    def late_attempts(self) -> int:
        """Return how many late attempts were refused by the database or by the worker itself, according to the log."""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        named = re.findall(r"(?:leases_lost task_ids|zombie_refused task_id)=\"?([0-9a-f,-]+)", text)
        return len({task_id for ids in named for task_id in ids.split(",") if task_id})

    def tail(self) -> str:
        """Return the end of the log."""
        return self.log.read_text(encoding="utf-8", errors="replace")[-_TAIL:]


def _processes() -> list[int]:
    """Return the ids of all visible processes on this machine."""
    if Path("/proc/self").exists():
        return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    listed = subprocess.run(["ps", "-A", "-o", "pid="], capture_output=True, text=True, check=True)
    return [int(pid) for pid in listed.stdout.split()]


class IndependentCount:
    """A single low-priority process that counts the same files without importing everbeat."""

    def __init__(self, paths: Iterable[str], *, folder: Path) -> None:
        (folder / "paths").write_bytes(b"\0".join(os.fsencode(path) for path in paths))
        self._output = folder / "independent.json"
        with (folder / "paths").open("rb") as given, self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-I", source_files.__file__],
                stdin=given,
                stdout=output,
                stderr=subprocess.DEVNULL,
            )

    def result(self, paths: Iterable[str], *, after_s: float) -> Counts | None:
        """Return the sums over these files, or None if the count failed.

        Waits at most until the demo, which started `after_s` seconds ago, has taken a minute, but allows at least 14 s.
        """
        try:
            if self._process.wait(timeout=max(_PATIENCE_S, _MINUTE_S - after_s)) != 0:
                return None
            by_path = json.loads(self._output.read_text(encoding="utf-8"))
            return total(Counts(**by_path[path]) for path in paths)
        except (subprocess.TimeoutExpired, ValueError, LookupError, TypeError):
            return None
        finally:
            self.kill()

    def kill(self) -> None:
        """Kill the process if it is still running."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


class DemoNatsServer:
    """The NATS server of one demo, and the number of messages that it has delivered since `start_counting`."""

    def __init__(self, folder: Path, *, schema: str, clock: Clock) -> None:
        self._server = NatsServer(folder)
        self._stream = StreamPlan(schema, NatsConfig(servers=[self.url]), _ANY_WAIT_S).stream
        self._clock = clock
        self._first = 0
        self._delivered_before = 0
        self._down_since = 0.0
        self._away_s = 0.0
        self._ended_meanwhile = 0
        self._at_restart: StreamCounters | None = None
        self._last: StreamCounters | None = None

    @property
    def url(self) -> str:
        """Return the URL for the workers."""
        return self._server.url

    @property
    def away_s(self) -> float:
        """Return the number of seconds since the server was killed."""
        return self._clock.monotonic() - self._down_since

    def start(self) -> None:
        """Start the server."""
        self._server.start()

    def start_counting(self) -> None:
        """Start counting. Call this after the workers have created their stream and before anything is sent."""
        self._first = self._read().last

    def kill(self) -> int:
        """Kill the server and return its process id."""
        self._last = self._read()
        self._delivered_before = self._last.delivered
        pid = self._server.pid
        self._server.kill()
        self._down_since = self._clock.monotonic()
        return pid

    def restart(self, *, ended_meanwhile: int) -> None:
        """Restart the server with its stored data."""
        self._away_s = self.away_s
        self._ended_meanwhile = ended_meanwhile
        self._server.start()
        self._at_restart = self._read()

    def is_wanted(self) -> bool:
        """Return whether a worker is requesting messages."""
        return self._read().wanted > 0

    def is_empty(self) -> bool:
        """Return whether every message has been acknowledged."""
        return self._read().held == 0

    def counts(self) -> MessageCounts:
        """Return the counts of delivered messages."""
        last = self._last if self._server.pid == 0 else self._read()
        if last is None:
            return MessageCounts(
                published=0, delivered=0, delivered_after=0, left=0, away_s=0.0, ended_meanwhile=0
            )
        since = 0 if self._at_restart is None else last.delivered - self._at_restart.delivered
        before = last.delivered if self._at_restart is None else self._delivered_before
        return MessageCounts(
            published=last.last - self._first,
            delivered=before + since,
            delivered_after=since,
            left=last.held,
            away_s=self._away_s,
            ended_meanwhile=self._ended_meanwhile,
        )

    def close(self) -> None:
        """Stop the server."""
        self._server.close()

    def _read(self) -> StreamCounters:
        # The stream does not exist until the first worker has started.
        found = self._server.counters(self._stream)
        return StreamCounters(last=0, held=0, delivered=0, wanted=0) if found is None else found
