"""An environment of its own for each other queue, in a temporary folder: its packages, and its adapter beside them.

What lives here: which queues there are, and making and running such environments. What may not: what is measured in them.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar, Final

from everbeat.cli.output import say
from everbeat.errors import EverbeatError

_INSTALL_S: Final = 300.0
_LAST_LINES: Final = 5
# An environment of its own sees neither our packages nor our settings.
_OURS: Final = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "NODE_PATH", "EVERBEAT_")


class PeerFailed(EverbeatError):
    """Another queue that cannot be installed or measured here."""

    code: ClassVar[str] = "PEER_FAILED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Another queue, installed in `folder`; `command` runs its adapter there."""

    name: str
    version: str
    folder: Path
    command: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _FromPyPI:
    """A queue for Python: its adapter, and what pip installs, the queue itself first."""

    adapter: str
    packages: tuple[str, ...]

    def make(self, name: str, folder: Path) -> Peer:
        run([sys.executable, "-m", "venv", str(folder)], folder=folder, within_s=_INSTALL_S)
        python = str(folder / "bin" / "python")
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        run([*install, *self.packages], folder=folder, within_s=_INSTALL_S)
        ask = f"from importlib.metadata import version; print(version({self.packages[0]!r}))"
        version = run([python, "-c", ask], folder=folder, within_s=_INSTALL_S).strip()
        return Peer(
            name=name, version=version, folder=folder, command=(python, _laid_in(folder, self.adapter))
        )


@dataclass(frozen=True, slots=True)
class _FromNpm:
    """A queue for Node: its adapter, and its package."""

    adapter: str
    package: str

    def make(self, name: str, folder: Path) -> Peer:
        node, npm = _program("node"), _program("npm")
        install = [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(folder)]
        run([*install, self.package], folder=folder, within_s=_INSTALL_S)
        ask = f"require('{self.package}/package.json').version"
        version = run([node, "-p", ask], folder=folder, within_s=_INSTALL_S).strip()
        return Peer(name=name, version=version, folder=folder, command=(node, _laid_in(folder, self.adapter)))


_RECIPES: Final[Mapping[str, _FromPyPI | _FromNpm]] = {
    "pgqueuer": _FromPyPI("pgqueuer.py", ("pgqueuer", "asyncpg", "uvloop")),
    "procrastinate": _FromPyPI("procrastinate.py", ("procrastinate", "psycopg[binary]")),
    "graphile-worker": _FromNpm("graphile_worker.mjs", "graphile-worker"),
}
PEERS: Final = tuple(_RECIPES)


@contextmanager
def installed(names: Sequence[str]) -> Iterator[list[Peer]]:
    """These queues, each in an environment that is thrown away afterwards; what cannot be installed is told and left out."""
    if not names:
        yield []
        return
    with TemporaryDirectory(prefix="everbeat-bench-", ignore_cleanup_errors=True) as folder:
        yield [peer for name in dict.fromkeys(names) if (peer := _made(name, Path(folder) / name))]


def leave_out(name: str, problem: EverbeatError) -> None:
    """Tells why a queue is not in the report."""
    say(f"warning: {name} is left out: {problem.message}")
    if problem.fix is not None:
        say(f"fix: {problem.fix}")


def run(
    command: Sequence[str], *, folder: Path, within_s: float, variables: Mapping[str, str] | None = None
) -> str:
    """What a program wrote to stdout; it and all that it started are ended in time. Raises PeerFailed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    try:
        process = subprocess.Popen(
            command, cwd=folder, env=environment | dict(variables or {}), text=True, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
    except OSError as problem:
        raise PeerFailed(f"{command[0]} cannot be started: {problem.strerror}.") from None
    with process:
        try:
            written, complaints = process.communicate(timeout=within_s)
        except subprocess.TimeoutExpired:
            raise PeerFailed(f"This did not end within {within_s:g} s: {_shown(command)}.") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        end = "\n".join((complaints.strip() or written.strip()).splitlines()[-_LAST_LINES:])
        raise PeerFailed(f"This ended with code {process.returncode}: {_shown(command)}. It wrote:\n{end}")
    return written


def _made(name: str, folder: Path) -> Peer | None:
    say(f"installing: {name}")
    folder.mkdir()
    try:
        return _RECIPES[name].make(name, folder)
    except PeerFailed as problem:
        leave_out(name, problem)
        return None


def _laid_in(folder: Path, adapter: str) -> str:
    """The adapter beside the packages, where Node looks for them; under a name that hides none of them from Python."""
    source = files("everbeat") / "cli" / "bench" / "peers" / adapter
    path = folder / f"adapter_of_{adapter}"
    path.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    return str(path)


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise PeerFailed(f"It needs {name}, which is not on PATH.", fix="install Node with npm.")
    return found


def _shown(command: Sequence[str]) -> str:
    return " ".join([Path(command[0]).name, *command[1:]])
