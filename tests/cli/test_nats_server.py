"""Test the NATS server that a command starts: it keeps its address after a kill and reports why it does not start."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from everbeat.cli.nats_server import NatsServer, NoNatsServer
from tests.nats_server import find_program


def test_a_killed_nats_server_keeps_its_address_and_its_store(tmp_path: Path) -> None:
    find_program()
    server = NatsServer(tmp_path / "nats")
    try:
        server.start()
        url, pid = server.url, server.pid
        assert server.counters("NOBODY") is None
        server.kill()
        assert server.pid == 0
        with pytest.raises(OSError, match="refused"):
            server.counters("NOBODY")
        server.start()
        assert (server.url, server.counters("NOBODY")) == (url, None)
        assert server.pid != pid
    finally:
        server.close()
    assert not psutil.pid_exists(pid)


def test_a_nats_server_that_does_not_start_reports_why(tmp_path: Path) -> None:
    find_program()
    server = NatsServer(tmp_path)
    (tmp_path / "server.conf").write_text("no such setting }")
    with pytest.raises(NoNatsServer, match="Its log ends with"):
        server.start()
