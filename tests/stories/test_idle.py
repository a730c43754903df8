"""The statements that an idle tree of one worker process sends, and its memory."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.conftest import NewServer

pytestmark = [pytest.mark.story, pytest.mark.long]

CODE = """
import os
from everbeat import App

app = App(os.environ["STORY_URL"])

@app.task
async def nothing() -> None:
    pass
"""
MEASURED_S = 20.0
MOST_STATEMENTS = 3.4
"""A second. 2.5 to 3.0 were measured."""
MOST_MEMORY = 3.3
"""Times the memory of a Python that has imported the libraries. 2.9 to 3.1 were measured."""
LIBRARIES = "import asyncio, msgspec, psycopg, sys; print('ready', flush=True); sys.stdin.read()"


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Return an environment in which Python keeps compiled code. Compilation leaves memory behind."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"PYTHONPYCACHEPREFIX": str(folder / "compiled")} | more


@contextmanager
def tree(folder: Path, url: str) -> Iterator[psutil.Process]:
    """Run a supervisor with one worker process, and wait until the worker is ready."""
    (folder / "idle.py").write_text(CODE)
    supervisor = subprocess.Popen(
        [sys.executable, "-m", "everbeat", "worker", "idle:app"],
        cwd=folder,
        env=environment(folder, STORY_URL=url),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert supervisor.stderr is not None
        while "worker_started" not in supervisor.stderr.readline():
            assert supervisor.poll() is None
        yield psutil.Process(supervisor.pid)
        supervisor.send_signal(signal.SIGTERM)
        supervisor.communicate(timeout=30)
    finally:
        supervisor.kill()
        supervisor.wait()


def pss_mb(pid: int) -> float:
    """Return the memory of a process. A page that several processes share counts in part for each of them."""
    found = re.search(r"^Pss: +(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1_024


def test_an_idle_tree_sends_few_statements_and_uses_little_memory(
    new_server: NewServer, tmp_path: Path
) -> None:
    server = new_server(settings={"log_statement": "all", "log_line_prefix": "%a|"})
    log = server.folder / "server.log"

    def statements() -> int:
        found = re.findall(r"^everbeat-.*\|LOG:.*(?:statement|execute)", log.read_text(), re.MULTILINE)
        return len(found)

    with tree(tmp_path, server.url):
        pass  # compiles the code, which the measured tree then loads
    with tree(tmp_path, server.url) as supervisor:
        time.sleep(5.0)  # the start sends more statements
        before, began = statements(), time.monotonic()
        time.sleep(MEASURED_S)  # the measured period
        rate = (statements() - before) / (time.monotonic() - began)
        processes = [supervisor, *supervisor.children()]
        with subprocess.Popen(
            [sys.executable, "-c", LIBRARIES],
            env=environment(tmp_path),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as libraries:
            assert libraries.stdout is not None
            libraries.stdout.readline()
            memory, least = sum(pss_mb(each.pid) for each in processes), pss_mb(libraries.pid)
    print(f"{rate:.2f} statements a second, {memory:.0f} MB, {memory / least:.2f} times the libraries")
    assert len(processes) == 2
    assert 0.5 < rate <= MOST_STATEMENTS
    assert memory <= MOST_MEMORY * least
