"""`everbeat web` as a real process: it says where it listens, answers, and ends with SIGTERM."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from everbeat.cli.web import web
from everbeat.errors import AddressInUse, ConfigurationError
from everbeat.store.target import Target
from everbeat.web.serving import listening


@contextmanager
def serving(target: Target, *options: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run the command and yield its process and its address."""
    command = [sys.executable, "-m", "everbeat", "web", "--schema", target.schema, "--port", "0", *options]
    environment = {**os.environ, "EVERBEAT_DATABASE_URL": target.url, **environment}
    with subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            found = re.search(r"http://\S+", line)
            assert found is not None, line + process.stderr.read()
            yield process, found[0]
        finally:
            process.kill()


def test_the_command_serves_pages_below_its_root_path_and_ends_with_exit_code_0(migrated: Target) -> None:
    with serving(migrated, "--root-path", "/ops", "--name", "shop production") as (process, address):
        page = httpx.get(f"{address}/tasks")
        assert page.status_code == 200, page.text
        assert "shop production" in page.text
        assert 'href="/ops/queues"' in page.text
        assert "server" not in page.headers
        stripped = httpx.get(f"{address.removesuffix('/ops')}/tasks")
        assert stripped.text.count('href="/ops/queues"') == 1, "a proxy can remove the path from its requests"
        assert httpx.get(f"{address}/tasks", headers={"host": "evil.test"}).status_code == 403
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0
        assert process.stderr is not None
        assert process.stdout is not None
        assert (process.stdout.read(), process.stderr.read()) == ("", "")


def test_a_port_that_is_taken_is_reported_with_a_fix() -> None:
    with listening("127.0.0.1", 0) as taken, pytest.raises(AddressInUse, match="cannot listen"):  # noqa: SIM117
        with listening("127.0.0.1", taken.getsockname()[1]):
            pass


@pytest.mark.parametrize(
    ("option", "given"),
    [
        ("--proxy", {"header": "X-User", "proxies": ["abc"]}),
        ("--proxy", {"header": "X-User", "proxies": [""]}),
        ("--trusted-header", {"header": "X User", "proxies": ["127.0.0.1"]}),
        ("--trusted-header", {"header": "", "proxies": ["127.0.0.1"]}),
        ("--trusted-header", {"header": "X-User"}),
        ("--role", {"header": "X-User", "proxies": ["127.0.0.1"], "role": "boss"}),
        ("--role-of ann", {"header": "X-User", "proxies": ["127.0.0.1"], "roles": ["ann=boss"]}),
        ("--role", {"role": "see"}),
        ("--hide", {"hide": ["charge:"]}),
        ("--name", {"name": "n\0"}),
        ("--host", {"host": "0.0.0.0"}),
        ("--root-path", {"root_path": "ops"}),
    ],
)
def test_an_invalid_option_is_refused_by_its_own_name(option: str, given: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        web(None, url="postgresql://localhost:1/x", port=0, **given)
    assert [problem.subject for problem in caught.value.problems] == [option], caught.value
