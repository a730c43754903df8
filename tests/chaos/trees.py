"""The worker trees of a run: `everbeat worker` as anybody starts it, each on a line of its own, and the signals that strike it.

What lives here: processes, only ever the run's own. What may not: when they are struck.
"""

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
    """One place where a supervisor runs, life after life; it logs to one file."""

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
        self._turn = threading.RLock()  # a fault kills it while the run looks whether it ended by itself

    def start(self) -> None:
        """Begins a life, if none is going on."""
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
            life = Life(tree=self.number, pid=pid, began=boot_s(), ended=None, exit_code=None, struck=False)
            self.lives.append(life)

    def is_alive(self) -> bool:
        """Whether its supervisor lives; notes the end of one that ended by itself."""
        with self._turn:
            if self._process is not None and self._process.poll() is not None:
                self._note_end(struck=False)
            return self._process is not None

    @property
    def supervisor(self) -> Sequence[psutil.Process]:
        """The supervisor, if it lives."""
        return _living([self.lives[-1].pid]) if self.is_alive() else []

    @property
    def workers(self) -> Sequence[psutil.Process]:
        """Its worker processes, oldest first."""
        return [child for one in self.supervisor for child in _children(one)]

    @property
    def task_processes(self) -> Sequence[psutil.Process]:
        """The task processes of all its workers."""
        return [child for worker in self.workers for child in _children(worker)]

    @property
    def processes(self) -> Sequence[psutil.Process]:
        """All of it, the supervisor first."""
        return [*self.supervisor, *self.workers, *self.task_processes]

    def kill_all(self, *, sparing: Collection[int] = ()) -> None:
        """SIGKILL for every process at once, but for those to be spared: none may see another one fall."""
        with self._turn:
            doomed = [process for process in self.processes if process.pid not in sparing]
            send(signal.SIGSTOP, doomed)
            send(signal.SIGKILL, doomed)
            self._bury()

    def kill_supervisor(self) -> None:
        """SIGKILL for the supervisor only."""
        with self._turn:
            send(signal.SIGKILL, self.supervisor)
            self._bury()

    def ask_to_stop(self) -> None:
        """SIGTERM for the supervisor."""
        send(signal.SIGTERM, self.supervisor)

    def wait(self) -> tuple[int | None, float]:
        """The exit code and how long it took from now; whoever does not end in time is killed, and has none."""
        began = boot_s()
        if self._process is None:
            return None, 0.0
        try:
            code: int | None = self._process.wait(timeout=_GRACE_S)
            self._note_end(struck=False)
        except subprocess.TimeoutExpired:
            code = None
            self.kill_all()
        return code, boot_s() - began

    def _bury(self) -> None:
        if self._process is not None:
            self._process.wait(timeout=_GRACE_S)
            self._note_end(struck=True)

    def _note_end(self, *, struck: bool) -> None:
        if self._process is None:
            return
        life = self.lives[-1]
        self.lives[-1] = Life(
            tree=life.tree,
            pid=life.pid,
            began=life.began,
            ended=boot_s(),
            exit_code=self._process.returncode,
            struck=struck,
        )
        self._process = None


def send(number: signal.Signals, processes: Sequence[psutil.Process]) -> None:
    """Sends a signal to those that still live."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def left_behind(trees: Sequence[Tree]) -> list[str]:
    """Processes of these trees that still live: whoever a tree started is in the session of its supervisor."""
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
