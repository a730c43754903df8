"""A child that user code forks keeps no connection of everbeat: no open one, no connection in progress, none to NATS."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from random import Random

import psutil
import pytest

from everbeat.nats.link import NatsLink
from everbeat.nats.options import NatsConfig
from everbeat.runtime.fork import close_in_forked_child
from everbeat.store import workers
from everbeat.store.connection import _ConnectingSocket
from everbeat.store.database import Database
from everbeat.store.target import Target
from tests.nats_server import NatsServer
from tests.store.conftest import StoreHarness


def inode_of(descriptor: int) -> int:
    return os.fstat(descriptor).st_ino


def open_inodes() -> set[int]:
    found = set()
    for name in Path("/proc/self/fd").iterdir():
        try:
            found.add(inode_of(int(name.name)))
        except OSError:
            continue  # the listing's own descriptor
    return found


def is_kept_by_a_child(inode: int, *, act: Callable[[], object] = lambda: None) -> bool:
    pid = os.fork()
    if pid == 0:
        kept = 2
        try:
            act()
            kept = int(inode in open_inodes())
        finally:
            os._exit(kept)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, 1)
    return bool(code)


def test_a_forked_child_has_no_open_connection_and_cannot_close_its_parents(
    database_url: str,
) -> None:  # J13
    connection = Target(database_url).connect("everbeat test")
    assert not is_kept_by_a_child(inode_of(connection.fileno()), act=connection.close)
    assert connection.execute("select 1").fetchone() == (1,)
    connection.close()


def test_a_forked_child_has_no_open_async_connection(database_url: str) -> None:  # J13
    async def main() -> None:
        connection = await Target(database_url).aconnect("everbeat test")
        assert not is_kept_by_a_child(inode_of(connection.fileno()))
        assert await (await connection.execute("select 1")).fetchone() == (1,)
        await connection.close()

    asyncio.run(main())


def test_a_forked_child_can_use_a_database_whose_locks_another_thread_held(
    db: StoreHarness,
) -> None:  # J13
    database = Database(db.target)

    def ask() -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)  # a child that waits for a lock of its parent's threads is killed
        database.run(workers.watch_beats())

    with database._hosts._guard, database._left._guard:
        assert not is_kept_by_a_child(inode_of(db.connection.fileno()), act=ask)


@pytest.mark.parametrize("in_loop", [False, True], ids=["thread", "loop"])
def test_a_forked_child_has_no_connection_that_was_in_progress(in_loop: bool) -> None:  # J13
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        target = Target(f"postgresql://nobody@127.0.0.1:{port}/nothing?connect_timeout=5&sslmode=disable")

        def connect() -> None:
            with pytest.raises(Exception, match="cannot be reached"):
                asyncio.run(target.aconnect("everbeat test")) if in_loop else target.connect("everbeat test")

        thread = threading.Thread(target=connect)
        thread.start()
        line, address = mute.accept()
        line.recv(1)  # the client sends its first packet and waits for a reply
        (descriptor,) = [
            found.fd
            for found in psutil.Process().net_connections("tcp")
            if found.laddr and found.laddr == address
        ]
        assert not is_kept_by_a_child(inode_of(descriptor))
        line.close()
        thread.join(10)
        assert not thread.is_alive()


def test_a_forked_child_has_no_nats_connection() -> None:  # J13
    async def main(url: str) -> None:
        link = await NatsLink.open(NatsConfig(servers=[url]), name="everbeat test", random=Random())
        assert not is_kept_by_a_child(inode_of(link._client.fileno()))
        await link._client.close()

    with NatsServer() as server:
        asyncio.run(main(server.url))


def test_a_forked_child_keeps_a_foreign_file_with_a_reused_descriptor() -> None:  # J13
    ours, theirs = socket.socketpair()
    attempt = _ConnectingSocket()
    close_in_forked_child(attempt)
    attempt.is_at(ours.fileno())
    number = ours.fileno()
    ours.close()
    others = os.open("/", os.O_RDONLY)
    assert others == number, "the lowest free number is used again"
    assert is_kept_by_a_child(inode_of(others)), "this one is not ours"
    os.close(others)
    theirs.close()
