"""Test that concurrent senders share the server's waits for its disk, also while an idle worker listens.

`commit_delay` imitates a disk that takes 10 ms for each flush. Commits that wait at the same time share a flush, unless each of them has to
wait until the one before it has ended. `everbeat bench --only senders` measures the same with processes and the real disk.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql

from everbeat import App
from everbeat.store import tasks
from everbeat.store.database import Database
from everbeat.store.target import Target
from everbeat.store.workers import listen
from tests.conftest import NewServer
from tests.store.conftest import StoreHarness

EACH: Final = 20
SLOW_DISK: Final = {
    "fsync": "on",
    "synchronous_commit": "on",
    "commit_delay": "10000",
    "commit_siblings": "0",
}


@pytest.fixture
def party(new_server: NewServer) -> Iterator[StoreHarness]:
    server = new_server(settings=SLOW_DISK)
    app = App(server.url)
    app.migrate()
    target = Target(server.url, schema=app.schema)
    with target.connect("everbeat test") as connection:
        made = StoreHarness(target, connection)
        made.supervisor("s1", "w1")
        yield made
        made.database.close()
    app.close()


def rate(target: Target, senders: int, *, joined: bool = False) -> float:
    """Return the sends per second of this many senders, each with its own database access, as a program has."""
    programs = [Database(target) for _ in range(senders)]
    ready = threading.Barrier(senders)

    def send(program: Database) -> tuple[float, float]:
        program.run(tasks.count_waiting("default", limit=1))  # connects
        ready.wait()
        began_at = time.monotonic()
        for _ in range(EACH):
            new = tasks.NewTask(id=uuid4(), name="work", queue="default", priority=0, args=b"{}")
            program.run(tasks.insert_task(new, channel=target.channel, joined=joined))
        return began_at, time.monotonic()

    with ThreadPoolExecutor(senders) as threads:
        moments = list(threads.map(send, programs))
    for program in programs:
        program.close()
    return senders * EACH / (max(ended for _, ended in moments) - min(began for began, _ in moments))


def best_rate(target: Target, senders: int) -> float:
    """Return the best of four rates, because other programs use the machine too."""
    return max(rate(target, senders) for _ in range(4))


# Beside other tests, the machine's noise hides a fifth. Commits one after another are slower by far more than half.
@pytest.mark.long
@pytest.mark.parametrize(
    ("numbers", "least"), [((4, 16), 0.5), pytest.param((1, 2, 4, 8, 16), 0.8, marks=pytest.mark.long)]
)
def test_senders_next_to_an_idle_worker_do_not_commit_one_after_another(
    numbers: tuple[int, ...], least: float, party: StoreHarness
) -> None:  # R5
    with psycopg.connect(party.target.url, autocommit=True) as listener:
        listener.execute(sql.SQL("listen {}").format(sql.Identifier(party.target.channel)))
        beside = {senders: best_rate(party.target, senders) for senders in numbers}
        one_by_one = rate(party.target, 16, joined=True)
        party.run(listen("w1", listens=False))
    alone = {senders: best_rate(party.target, senders) for senders in beside}
    print(beside, alone, one_by_one)
    for rates in (beside, alone):
        assert rates[16] >= 0.9 * max(rates[senders] for senders in numbers[:-1])
    assert all(beside[senders] >= least * alone[senders] for senders in beside)
    assert one_by_one < 0.5 * beside[16]  # a notification inside each transaction
