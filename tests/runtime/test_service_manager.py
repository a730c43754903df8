"""systemd is notified through its datagram socket, in the file system or in the abstract namespace."""

from __future__ import annotations

import os
import socket
import sys
import uuid
from pathlib import Path

import pytest

from everbeat.runtime.service_manager import ServiceManager

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has abstract sockets")


@pytest.mark.parametrize("kind", ["file", pytest.param("abstract", marks=ON_LINUX)])
def test_each_notification_arrives_as_one_datagram(kind: str, tmp_path: Path) -> None:
    name = f"everbeat-{uuid.uuid4().hex}"
    shown, bound = (f"@{name}", f"\0{name}") if kind == "abstract" else (str(tmp_path / "n"),) * 2
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(bound)
        receiver.settimeout(10)
        environment = {"NOTIFY_SOCKET": shown, "OTHER": "kept"}
        manager = ServiceManager.take(environment)
        assert manager is not None
        assert environment == {"OTHER": "kept"}, "child processes must not notify systemd"
        manager.notify("READY=1", "STATUS=Running.")
        assert receiver.recv(1_000) == b"READY=1\nSTATUS=Running."


def test_the_watchdog_is_that_of_this_process_only() -> None:
    def watchdog_of(**variables: str) -> float | None:
        manager = ServiceManager.take({"NOTIFY_SOCKET": "/run/n", **variables})
        assert manager is not None
        return manager.watchdog_s

    assert watchdog_of() is None
    assert watchdog_of(WATCHDOG_USEC="30000000") == 30.0
    assert watchdog_of(WATCHDOG_USEC="30000000", WATCHDOG_PID=str(os.getpid())) == 30.0
    assert watchdog_of(WATCHDOG_USEC="30000000", WATCHDOG_PID="1") is None
    assert watchdog_of(WATCHDOG_USEC="soon") is None


def test_a_manager_that_is_gone_or_unusable_causes_no_error() -> None:
    manager = ServiceManager.take({"NOTIFY_SOCKET": "/nowhere/at/all"})
    assert manager is not None
    manager.notify("READY=1")
    assert ServiceManager.take({}) is None
    assert ServiceManager.take({"NOTIFY_SOCKET": "vsock:2:1234"}) is None
