"""Numbers in the documentation equal those of the code, or what a run counts."""

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest

from everbeat.nats import relay
from everbeat.store.database import MOST_CONNECTIONS
from tests.docs.tables import table, text_of

WITHIN_S = 60.0
STEADY_S = 1.0
PROGRAM = """
from everbeat import App

app = App()

@app.task
def add(a: int, b: int) -> int:
    return a + b

if __name__ == "__main__":
    app.run_worker()
"""
COUNTS = re.compile(
    r"(?P<supervisor>\d+) for a supervisor, (?P<worker>\d+) for a worker process, "
    r"(?P<other>\d+) for a worker in another program"
)
NUMBERS = {"two": 2, "three": 3, "four": 4, "five": 5}


@pytest.fixture
def own_database(database_url: str) -> Iterator[str]:
    """The URL of an empty database on the test server."""
    name = f"facts_{uuid.uuid4().hex[:12]}"
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
        yield urlsplit(database_url)._replace(path=f"/{name}").geturl()
        connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


@pytest.mark.parametrize("page", ["workers.md", "performance.md"])
def test_the_pages_give_the_connection_numbers_of_the_table(page: str) -> None:
    written = COUNTS.search(" ".join(text_of(page).split()))
    assert written is not None
    assert {name: int(number) for name, number in written.groupdict().items()} == in_the_table()


@pytest.mark.parametrize("processes", [1, 3])
def test_a_worker_tree_opens_the_documented_connections(
    own_database: str, tmp_path: Path, processes: int
) -> None:
    options = ["--processes", str(processes)]
    with running(["-m", "everbeat", "worker", "shop:app", *options], own_database, tmp_path):
        names = steady_connections(own_database, workers=processes, folder=tmp_path)
    listen = [name for name in names if name.endswith(" listen")]
    supervisor = [name for name in names if " supervisor" in name]
    assert len(listen) == 1
    assert len(supervisor) == in_the_table()["supervisor"]
    assert len(names) - len(supervisor) - len(listen) == processes * in_the_table()["worker"]
    most = re.search(r"at most (\d+) \+ (\d+) P connections", text_of("internals.md"))
    assert most is not None
    assert len(names) == int(most[1]) + int(most[2]) * processes


def test_an_in_process_worker_opens_the_documented_connections(own_database: str, tmp_path: Path) -> None:
    with running(["shop.py"], own_database, tmp_path):
        names = steady_connections(own_database, workers=1, folder=tmp_path)
    assert len(names) == in_the_table()["other"]


def test_a_client_opens_the_documented_number_of_connections() -> None:
    (row,) = (row for row in connections() if row["Process"] == "client")
    assert re.findall(r"up to (\d+) for threads, (\d+) for each loop", row["Connections"]) == [
        (str(MOST_CONNECTIONS), str(MOST_CONNECTIONS))
    ]


@pytest.mark.parametrize("page", ["nats-internals.md", "decisions.md"])
def test_the_documented_turn_of_the_relay_is_that_of_the_code(page: str) -> None:
    written = re.search(
        r"renews its turn every second and loses it after (\w+) seconds without a renewal",
        " ".join(text_of(page).split()),
    )
    assert written is not None
    assert (1.0, NUMBERS[written[1]]) == (relay.KEEP_EVERY_S, relay.TURN_S)


def connections() -> list[dict[str, str]]:
    return table("internals.md", "Process", "Code", "Loop, threads", "Connections")


def in_the_table() -> dict[str, int]:
    """The number that docs/internals.md gives for each kind of process, without the additions."""
    rows = {row["Process"]: row["Connections"] for row in connections()}
    assert rows["task process"] == "none"
    names = {
        "supervisor": "supervisor",
        "worker": "worker process",
        "other": "worker in another program (app.run_worker)",
    }
    return {short: int(rows[name].partition(":")[0]) for short, name in names.items()}


@contextmanager
def running(arguments: Sequence[str], url: str, folder: Path) -> Iterator[None]:
    """Run a program that has a worker, and stop it by SIGTERM."""
    (folder / "shop.py").write_text(PROGRAM, encoding="utf-8")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            env=os.environ | {"EVERBEAT_DATABASE_URL": url},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        yield
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=WITHIN_S) == 0
    finally:
        process.kill()
        process.wait()


def steady_connections(url: str, *, workers: int, folder: Path) -> list[str]:
    """The names of all sessions of the tree, once it listens, each worker has a session, and they stay the same for a second."""
    deadline = time.monotonic() + WITHIN_S
    found: list[str] = []
    since = time.monotonic()
    with psycopg.connect(url, autocommit=True, application_name="counter") as connection:
        while time.monotonic() < deadline:
            rows = connection.execute(
                "select application_name from pg_stat_activity where datname = current_database()"
                " and application_name like 'everbeat-%' order by 1"
            )
            now = [name for (name,) in rows]
            if now != found:
                found, since = now, time.monotonic()
            listens = any(" listen" in name for name in found)
            at_work = {
                name.partition(" worker ")[2].partition(".")[0] for name in found if " worker " in name
            }
            if listens and len(at_work) == workers and time.monotonic() - since > STEADY_S:
                return found
            time.sleep(0.1)  # PostgreSQL has no event for the sessions of others
    raise AssertionError(f"no steady state: {found}\n{(folder / 'log').read_text()}")
