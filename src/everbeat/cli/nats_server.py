"""A nats-server that a command starts for itself: on loopback, with a store of its own, and it ends with the command.

What lives here: the process, its settings, its ports, and what it says of its streams. What may not: what the messages are about, and a
client of NATS: the server is asked by its monitoring page.
"""

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
from everbeat.runtime.parent import die_with_parent

_READY_S: Final = 20.0
_GRACE_S: Final = 10.0
_LOOK_EVERY_S: Final = 0.02
_ASK_S: Final = 5.0
_TAIL: Final = 2_000
_LOOPBACK: Final = "127.0.0.1"


class NoNatsServer(NatsError):
    """The program nats-server is not installed, or does not start."""

    code: ClassVar[str] = "NATS_SERVER_NOT_INSTALLED"


class StreamCounters(Struct, frozen=True, kw_only=True):
    """What the server says of one stream: the number of its last message, how many it holds, how many deliveries there were, and how many
    requests for more are open."""

    last: int
    held: int
    delivered: int
    wanted: int


class NatsServer:
    """One server below a folder; its ports stay the same over restarts. Raises NoNatsServer, and NatsNotInstalled where nobody could speak to it."""

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
        """Where clients find it."""
        return f"nats://{_LOOPBACK}:{self._port}"

    @property
    def pid(self) -> int:
        """Its process id; 0 while it does not run."""
        return 0 if self._process is None else self._process.pid

    def start(self) -> None:
        """Starts it, with what it had stored before; it takes connections afterwards. Raises NoNatsServer where it does not come up."""
        with (self._folder / "server.log").open("ab") as log:
            own = [sys.executable, "-m", "everbeat.cli.nats_server", str(os.getpid())]
            self._process = subprocess.Popen(
                [*own, self._program, "-c", str(self._folder / "server.conf")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is meant for the command
            )
        clock = SystemClock()
        give_up_at = clock.monotonic() + _READY_S
        while not self._answers():
            if self._process.poll() is not None or clock.monotonic() > give_up_at:
                self.kill()
                raise NoNatsServer(
                    f"nats-server does not start; it says:\n{self._tail()}",
                    fix=f"see whether {self._program} -js works here.",
                )
            threading.Event().wait(_LOOK_EVERY_S)  # another process gets ready

    def kill(self) -> None:
        """Ends it at once, as a crash does; nothing if it does not run."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(_GRACE_S)

    def counters(self, stream: str) -> StreamCounters | None:
        """What it says of a stream; None where it has none of that name. Raises OSError while it does not run."""
        opener = build_opener(ProxyHandler({}))  # no proxy leads to this machine
        with opener.open(f"http://{_LOOPBACK}:{self._page}/jsz?consumers=true", timeout=_ASK_S) as page:
            told = json.load(page)
        return next((_read(each) for each in _streams(told) if each["name"] == stream), None)

    def close(self) -> None:
        """Ends it; what it stored goes with the folder."""
        self.kill()

    def _settings(self) -> Iterator[str]:
        yield f'host: "{_LOOPBACK}"'
        yield f"port: {self._port}"
        yield f'http: "{_LOOPBACK}:{self._page}"'
        yield f"jetstream {{ store_dir: {json.dumps(str(self._folder / 'store'))} }}"
        yield ""

    def _answers(self) -> bool:
        try:
            with socket.create_connection((_LOOPBACK, self._port), timeout=_ASK_S) as connection:
                return connection.recv(4) == b"INFO"
        except OSError:
            return False

    def _tail(self) -> str:
        return (self._folder / "server.log").read_text(encoding="utf-8", errors="replace")[-_TAIL:]


def find_program() -> str:
    """The nats-server beside this Python, or else on the PATH. Raises NoNatsServer where there is none."""
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if beside.is_file() else shutil.which("nats-server")
    if found is None:
        raise NoNatsServer(
            "The program nats-server is missing, beside this Python and on the PATH.",
            fix="pip install 'everbeat[nats,nats-server]'.",
        )
    return found


def _free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody uses at this moment."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind((_LOOPBACK, 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def _streams(told: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for account in told.get("account_details") or ():
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
