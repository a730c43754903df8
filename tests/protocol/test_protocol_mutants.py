"""Known mistakes in the real statements and recovery services: a random run of actions must find each of them.

A mutant counts as caught only because the unchanged protocol passes the same seed. Only the model (`test_model`) can show
beats that renew leases one by one, and so keep a dead successor alive.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from everbeat.domain.recovery import decision
from everbeat.recovering import observer
from everbeat.recovering.notice import startup
from everbeat.recovering.notice.startup import Proven
from everbeat.store.target import Target
from tests.protocol.stateful.database import FaultyDatabase
from tests.protocol.stateful.random_run import random_run

MOST_SEEDS = 60
HELD = "where t.claim_id = a.claim_id and t.state = 'RUNNING'"
CLAIM_ID = "encode(substr(sha256(uuid_send(%(claim_call)s) || uuid_send(t.id) || int8send(t.fence)), 17), 'hex')::uuid"


@dataclass(frozen=True)
class Mutant:
    """A mistake: texts in statements (the text to replace and its replacement), or a replaced part of a recovery service."""

    why: str
    texts: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    part: tuple[Any, str, Any] | None = None
    seed: int = 0


MUTANTS = [
    Mutant("settle by id alone", {"task/settle_attempts": (HELD, "where true")}),
    Mutant("settle by state", {"task/settle_attempts": (HELD, "where t.state = 'RUNNING'")}),
    Mutant("completed by id alone", {"task/complete_attempts": ("where t.id = a.id and t.claim_id = a.claim_id and", "where t.id = a.id and")}),
    # The claim id then depends only on the worker's name, so every guard by claim_id is a guard by name.
    Mutant("every guard by worker name", {"task/claim_tasks": (CLAIM_ID, "md5(%(worker_id)s)::uuid")}, seed=4),
    Mutant("a claim id without the random call id", {"task/claim_tasks": ("uuid_send(%(claim_call)s) || ", "")}, seed=6),
    Mutant("an unfenced start", {"task/start_tasks": ("where t.claim_id = a.claim_id", "where true")}),
    Mutant("an unfenced release", {"task/release_leases": ("where t.claim_id = a.claim_id and", "where")}, seed=3),
    Mutant("unfenced progress", {"task/record_progress": ("and t.claim_id = %(claim_id)s", "and %(claim_id)s::uuid is not null")}),
    Mutant("an unfenced checkpoint", {"task/record_checkpoint": ("and t.claim_id = %(claim_id)s", "and %(claim_id)s::uuid is not null")}),
    Mutant("a recovery without swap on the claim", {"task/recover_leases": ("where t.claim_id = a.claim_id and t.state", "where t.state")}, seed=14),
    Mutant("a recovery without swap on the beat", {
        "task/recover_leases": ("and s.beat_seq = %(holder_seq)s", "and %(holder_seq)s::bigint is not null"),
        "worker/end_supervisor": ("or s.beat_seq = %(beat_seq)s", "or true"),
    }, seed=5),
    Mutant("a crash that drops a requested cancel", {"task/recover_leases": ("when t.cancel_requested_at is not null then 'cancel'", "")}),
    Mutant("crashes that are not counted", {
        "task/recover_leases": ("t.crash_count::bigint + (h.outcome is not distinct from 'CRASHED')::integer", "t.crash_count::bigint"),
    }),
    Mutant("beats that copy the table instead of memory", {
        "worker/record_beat": ("from lease l where not exists (select from held h", "from lease l where false and not exists (select from held h"),
    }, seed=5),
    Mutant("beats that name tasks, not claims", {
        "worker/record_beat": (
            "where not exists (select from lease l where l.claim_id = h.claim_id)",
            "where not exists (select from {schema}.tasks t where t.id = h.id and t.claim_id is not null)",
        ),
    }, seed=6),
    Mutant("beats that revive an ended supervisor", {"worker/record_beat": ("and s.ended_at is null", "")}, seed=4),
    Mutant("claims by a buried worker", {"task/claim_tasks": ("and ended_at is null for key share", "for key share")}, seed=54),
    Mutant("sweeps that never revisit ended workers", {
        "task/list_leases_of_ended_workers": ("where l.ended_at is not null", "where false and l.ended_at is not null"),
    }, seed=17),
    Mutant("no amnesty", part=(observer.Amnesty, "is_due", lambda *_, **__: False), seed=54),
    Mutant("a start-up that proves deaths by host names", part=(startup, "finding_on", lambda *_, **__: Proven("its host has my name")), seed=6),
    Mutant("no limit of crashes", part=(decision, "is_exhausted", lambda *_, **__: False), seed=31),
]  # fmt: skip


@pytest.fixture(scope="module")
def database(database_url: str) -> Iterator[FaultyDatabase]:
    database = FaultyDatabase(Target.parse(database_url, schema=f"test_{uuid4().hex[:12]}"))
    yield database
    database.close()


@pytest.fixture(scope="module")
def clean() -> dict[int, bool]:
    """The seeds that the unchanged protocol has passed."""
    return {}


def notices(database: FaultyDatabase, mutant: Mutant | None, seed: int) -> str | None:
    """Return the finding of a random run with this seed: a broken promise or a constraint of the schema."""
    database.make({} if mutant is None else mutant.texts)
    with pytest.MonkeyPatch.context() as patch:
        if mutant is not None and mutant.part is not None:
            patch.setattr(*mutant.part)
        try:
            random_run(database, seed)
        except (AssertionError, psycopg.Error) as red:
            return f"{type(red).__name__}: {red}"
    return None


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "mutant",
    # The model and the mutants of single statements find the same mistakes. "no amnesty" takes ten times as long as the others.
    [
        pytest.param(mutant, marks=pytest.mark.long) if number % 2 or mutant.why == "no amnesty" else mutant
        for number, mutant in enumerate(MUTANTS)
    ],
    ids=lambda mutant: mutant.why,
)
def test_a_random_run_finds_each_mutant_of_the_protocol(
    mutant: Mutant, database: FaultyDatabase, clean: dict[int, bool]
) -> None:
    """The seed of a mutant found it when it was written; if the protocol has changed since, others are tried."""
    for seed in (mutant.seed, *range(MOST_SEEDS)):
        if notices(database, mutant, seed) is None:
            continue
        if seed not in clean:
            found = notices(database, None, seed)
            assert found is None, f"the unchanged protocol fails with seed {seed}: {found}"
            clean[seed] = True
        return
    pytest.fail(f"no random run found: {mutant.why}")
