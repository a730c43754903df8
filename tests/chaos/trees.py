"""The worker trees of a run: `everbeat worker` processes, each with a separate line to the database, and the signals sent to them."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

from tests.chaos.clock import boot_s
from tests.chaos.evidence import Life
from tests.chaos.line import Line

LOCATOR: Final = "tests.chaos.program:app"
_GRACE_S: Final = 30.0


class Tree:
    """A worker tree that can be started several times, one life after another. All lives write to the same log file."""

    def __init__(
        self,
        number: int,
        *,
        line: Line,
        environment: Mapping[str, str],
        folder: Path,
        nats_url: str | None = None,
    ) -> None:
        self.number = number
        self.line = line
        self.log = folder / f"tree-{number}.log"
        self.lives: list[Life] = []
        self._folder = folder
        self._environment = dict(environment) | {"CHAOS_URL": line.url}
        if nats_url is not None:
            self._environment["CHAOS_NATS"] = nats_url
        self._process: subprocess.Popen[bytes] | None = None
        self._turn = (
            threading.RLock()
        )  # a fault kills the tree while the run checks whether it exited by itself

    def start(self) -> None:
        """Start a supervisor if none is running."""
        with self._turn, self.log.open("ab") as output:
            if self.is_alive():
                return
            self._process = subprocess.Popen(
                [sys.executable, "-m", "everbeat", "worker", LOCATOR],
                env=self._environment,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            pid = self._process.pid
            life = Life(
                tree=self.number, pid=pid, began=boot_s(), ended=None, exit_code=None, was_killed=False
            )
            self.lives.append(life)

    def is_alive(self) -> bool:
        """Return whether the tree's supervisor is running. Record the exit of a supervisor that exited by itself."""
        with self._turn:
            if self._process is not None and self._process.poll() is not None:
                self._note_end(was_killed=False)
            return self._process is not None

    @property
    def supervisor(self) -> Sequence[psutil.Process]:
        """Return the supervisor process, or nothing if it is not running."""
        return _living([self.lives[-1].pid]) if self.is_alive() else []

    @property
    def workers(self) -> Sequence[psutil.Process]:
        """Return the tree's worker processes, oldest first."""
        return [child for one in self.supervisor for child in _children(one)]

    @property
    def task_processes(self) -> Sequence[psutil.Process]:
        """Return the task processes of all workers in the tree."""
        return [child for worker in self.workers for child in _children(worker)]

    @property
    def processes(self) -> Sequence[psutil.Process]:
        """Return all processes of the tree, with the supervisor first."""
        return [*self.supervisor, *self.workers, *self.task_processes]

    def kill_all(self, *, sparing: Collection[int] = ()) -> None:
        """Kill every process at once, except the processes in `sparing`, so that no process can observe the death of another."""
        with self._turn:
            doomed = [process for process in self.processes if process.pid not in sparing]
            send(signal.SIGSTOP, doomed)
            send(signal.SIGKILL, doomed)
            self._bury()

    def kill_supervisor(self) -> None:
        """Kill the supervisor only."""
        with self._turn:
            send(signal.SIGKILL, self.supervisor)
            self._bury()

    def ask_to_stop(self) -> None:
        """Send SIGTERM to the supervisor."""
        send(signal.SIGTERM, self.supervisor)

    def wait(self) -> tuple[int | None, float]:
        """Wait until the tree exits. Return its exit code and how many seconds that took.

        A tree that does not exit in time is killed, and its exit code is None.
        """
        began = boot_s()
        if self._process is None:
            return None, 0.0
        try:
            code: int | None = self._process.wait(timeout=_GRACE_S)
            self._note_end(was_killed=False)
        except subprocess.TimeoutExpired:
            code = None
            self.kill_all()
        return code, boot_s() - began

    def _bury(self) -> None:
        if self._process is not None:
            self._process.wait(timeout=_GRACE_S)
            self._note_end(was_killed=True)

    def _note_end(self, *, was_killed: bool) -> None:
        if self._process is None:
            return
        life = self.lives[-1]
        self.lives[-1] = Life(
            tree=life.tree,
            pid=life.pid,
            began=life.began,
            ended=boot_s(),
            exit_code=self._process.returncode,
            was_killed=was_killed,
        )
        self._process = None


def send(number: signal.Signals, processes: Sequence[psutil.Process]) -> None:
    """Send a signal to those of the processes that are still running."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def left_behind(trees: Sequence[Tree]) -> list[str]:
    """Return descriptions of the remaining processes of these trees. A tree's processes are in its supervisor's session."""
    sessions = {life.pid for tree in trees for life in tree.lives}
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            status = process.status()
            if process.pid in sessions or status == psutil.STATUS_ZOMBIE:
                continue
            if _session_of(process.pid) in sessions:
                found.append(f"{process.pid} {' '.join(process.cmdline())[:200]}")
    return found


def _session_of(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return int(fields[3])


def _living(pids: Sequence[int]) -> list[psutil.Process]:
    found = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return found


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return sorted(process.children(), key=lambda child: child.pid)
    except psutil.NoSuchProcess:
        return []
