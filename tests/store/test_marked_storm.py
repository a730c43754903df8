"""Workers of random versions on one table: no task is declined twice, and every task that some version understands runs."""

from __future__ import annotations

import json
from random import Random
from uuid import UUID

import pytest

from everbeat.domain.task.needs import Parameters
from everbeat.store.claims import Claimed
from everbeat.store.leases import decline
from everbeat.store.tasks import BEGINNING, MarkedGroup, MarkedPlace, marked
from tests.store.conftest import StoreHarness
from tests.variants import long_except

NAMES = ("a", "b", "c", "d")
WORKERS = ("w1", "w2", "w3")
TASKS = 30


class Party:
    """A worker of one version: the parameters that its function accepts, and the groups that it has learned."""

    def __init__(self, worker_id: str, random: Random) -> None:
        takes = tuple(name for name in NAMES if random.random() < 0.6)
        self.worker_id = worker_id
        self.accepts = Parameters(takes, tuple(name for name in takes if random.random() < 0.3))
        self.known: list[MarkedGroup] = []
        self.after: MarkedPlace = BEGINNING

    def learn(self, db: StoreHarness, most: int) -> None:
        page = db.run(marked(self.after, most=most))
        self.known += [
            each for each in page.groups if self.accepts.fits_needs(each.needs) and each not in self.known
        ]
        self.after = page.after or BEGINNING


class Storm:
    """`declines` counts how often each task was declined."""

    def __init__(self, db: StoreHarness, seed: int) -> None:
        self.db = db
        self.random = Random(seed)
        db.supervisor("s2", "w3")
        self.parties = [Party(worker_id, self.random) for worker_id in WORKERS]
        self.given: dict[UUID, set[str]] = {}
        self.declines: dict[UUID, int] = {}
        for _ in range(TASKS):
            names = {name for name in NAMES if self.random.random() < 0.5}
            serial = self.random.choice([None, None, "line:1", "line:2"])
            task_id = db.send(
                args=json.dumps(dict.fromkeys(self.random.sample(sorted(names), len(names)), 1)).encode(), serial=serial,
                queue=self.random.choice(["x", "y"]), priority=self.random.choice([0, 1]),
            )  # fmt: skip
            self.given[task_id] = names

    def turn(self, party: Party, *, calm: bool) -> int:
        """Claim once and handle the claimed tasks; return how many were claimed."""
        starts = self.random.choice([0, 5])
        taken = self.db.claim(party.worker_id, limit=5, starts=starts, marked=party.known)
        for one in taken:
            fits = party.accepts.fits(self.given[one.id])
            assert fits or not one.is_marked, "a marked task was leased by code that does not understand it"
            if fits:
                self.run(one, calm=calm)
            else:
                self.declines[one.id] = self.declines.get(one.id, 0) + 1
                answer = self.db.run(decline([(one.id, one.claim_id)], channel="c"))
                assert answer == {one.claim_id: "PENDING"}
        return len(taken)

    def run(self, one: Claimed, *, calm: bool) -> None:
        if one.started_at is None:
            assert self.db.start(one) == ["started"]
        fate = "COMPLETED" if calm else self.random.choice(["COMPLETED", "FAILED", "RELEASED", "SUSPENDED"])
        more = {"error": b"{}", "retry_in_ms": 0} if fate == "FAILED" else {}
        self.db.settle(one, fate, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", long_except(range(6), 0, 1))
def test_workers_of_random_versions_decline_no_task_twice_and_run_all_that_they_understand(
    db: StoreHarness, seed: int
) -> None:  # J2
    storm = Storm(db, seed)
    for _ in range(60):
        party = storm.random.choice(storm.parties)
        if storm.random.random() < 0.3:
            party.learn(db, most=storm.random.choice([1, 3, 100]))
        storm.turn(party, calm=False)
    for _ in range(20):
        for party in storm.parties:
            party.after = BEGINNING
            party.learn(db, most=100)
        if not sum(storm.turn(party, calm=True) for party in storm.parties):
            break
    else:
        pytest.fail("tasks are still handed on")
    assert max(storm.declines.values(), default=0) <= 1
    waits = db.table("tasks", "id, state, serial, serial_at")
    heads = {}
    for task_id, state, serial, _ in sorted(waits, key=lambda row: (row[3] is not None, row[3], row[0].int)):
        if serial is not None and state != "COMPLETED":
            heads.setdefault(serial, task_id)
    for task_id, state, serial, _ in waits:
        understood = any(party.accepts.fits(storm.given[task_id]) for party in storm.parties)
        is_behind = serial is not None and heads.get(serial, task_id) != task_id
        if state == "PENDING":
            assert not understood or is_behind
        else:
            assert (state, understood) == ("COMPLETED", True)
    assert [row for row in db.table("attempts", "outcome") if row[0] == "DECLINED"] == []
