"""Fork commands from a process that has imported everbeat, which saves half a second for each command."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, suppress
from pathlib import Path

import msgspec


class Order(msgspec.Struct):
    """A command line to run; its streams are files."""

    arguments: list[str]
    folder: str
    environment: dict[str, str]
    output: str
    errors: str


class Forks:
    """The client: it sends one command at a time and gets the exit code."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.cli.forks", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                cwd=Path(__file__).parents[2],
                env={name: value for name, value in os.environ.items() if not name.startswith("EVERBEAT_")},
            )
        self._line = ours.makefile("rwb")
        ours.close()

    def run(
        self, arguments: Sequence[str], *, folder: Path, environment: Mapping[str, str], timeout_s: float
    ) -> tuple[int, str, str]:
        """Return the exit code, standard output and standard error. Raises: TimeoutExpired, after killing the command."""
        with tempfile.NamedTemporaryFile() as output, tempfile.NamedTemporaryFile() as errors:
            try:
                code = self._code(
                    Order([*arguments], str(folder), dict(environment), output.name, errors.name), timeout_s
                )
            except (
                BaseException
            ):  # such as the end of the test's time: the next command must not get this reply
                self._process.kill()
                self.close()
                self._start()
                raise
            told = Path(output.name).read_text("utf-8"), Path(errors.name).read_text("utf-8")
        if code == -signal.SIGKILL:
            raise subprocess.TimeoutExpired([*arguments], timeout_s, *told)
        return code, *told

    def _code(self, order: Order, timeout_s: float) -> int:
        self._line.write(msgspec.json.encode(order) + b"\n")
        self._line.flush()
        pid = int(self._line.readline())
        timer = threading.Timer(timeout_s, _kill, [pid])
        timer.start()
        try:
            return int(self._line.readline())
        finally:
            timer.cancel()

    def close(self) -> None:
        """End the process."""
        self._line.close()
        self._process.wait(timeout=10)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _serve(line: int) -> None:
    with socket.socket(fileno=line) as connection, connection.makefile("rwb") as orders:
        while text := orders.readline():
            pid = os.fork()
            if pid == 0:
                connection.detach()
                _become(msgspec.json.decode(text, type=Order))
            orders.write(b"%d\n" % pid)
            orders.flush()
            _, status = os.waitpid(pid, 0)
            orders.write(b"%d\n" % os.waitstatus_to_exitcode(status))
            orders.flush()


def _become(order: Order) -> None:
    from everbeat.cli.main import main

    for name, stream in ((order.output, 1), (order.errors, 2)):
        descriptor = os.open(name, os.O_WRONLY | os.O_TRUNC)
        os.dup2(descriptor, stream)
        os.close(descriptor)
    os.chdir(order.folder)
    os.environ.clear()
    os.environ.update(order.environment)
    sys.path[0] = order.folder
    sys.argv = ["everbeat", *order.arguments]
    code = 1
    try:
        main()
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:  # noqa: BLE001 - the end of a process
        sys.excepthook(*sys.exc_info())
    finally:
        # As the interpreter does at its end: run the exit handlers and flush the buffers.
        import atexit

        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _load() -> None:
    """Import what commands import. The parser of the command line imports a third of it when it parses its first options."""
    from everbeat.cli.main import COMMANDS, load_command, main

    for command in COMMANDS:
        load_command(command)
    arguments, sys.argv = sys.argv, ["everbeat", "tasks", "list", "--limit", "wrong"]
    with Path(os.devnull).open("w") as nowhere, redirect_stderr(nowhere), suppress(SystemExit):
        main()
    sys.argv = arguments
    gc.freeze()  # otherwise the collector of each child copies the memory of all that is loaded


if __name__ == "__main__":
    _load()
    _serve(int(sys.argv[1]))
