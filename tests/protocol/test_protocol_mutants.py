"""The classic mistakes, put into the real statements and the real caretakers: a storm of turns must notice each of them.

A mutant counts as caught only because the protocol as it is passes the same seed. What cannot be shown here is the model's
(`test_model`): beats that renew leases one by one, and so keep a dead successor alive.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from everbeat.domain import recovery
from everbeat.services import observer, startup
from everbeat.services.proof import Proven
from everbeat.store.target import Target
from tests.protocol.stateful.stage import Stage
from tests.protocol.stateful.storm import storm

MOST_SEEDS = 60
HELD = "where t.claim_id = a.claim_id and t.state = 'RUNNING'"
CLAIM_ID = "encode(substr(sha256(uuid_send(%(claim_call)s) || uuid_send(t.id) || int8send(t.fence)), 17), 'hex')::uuid"


@dataclass(frozen=True)
class Mutant:
    """A mistake: texts in statements (what stands there, what the mutant has instead), or a part of a caretaker."""

    why: str
    texts: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    part: tuple[Any, str, Any] | None = None
    seed: int = 0


MUTANTS = [
    Mutant("settle by id alone", {"task/settle": (HELD, "where true")}),
    Mutant("settle by state", {"task/settle": (HELD, "where t.state = 'RUNNING'")}),
    Mutant("completed by id alone", {"task/complete": ("where t.id = a.id and t.claim_id = a.claim_id and", "where t.id = a.id and")}),
    # What a claim hands out is made of nothing but the worker's name: every guard by claim_id is then one by name.
    Mutant("every guard by worker name", {"task/claim": (CLAIM_ID, "md5(%(worker_id)s)::uuid")}, seed=4),
    Mutant("a claim id without chance in it", {"task/claim": ("uuid_send(%(claim_call)s) || ", "")}, seed=6),
    Mutant("an unfenced start", {"task/start": ("where t.claim_id = a.claim_id", "where true")}),
    Mutant("an unfenced release", {"task/release": ("where t.claim_id = a.claim_id and", "where")}, seed=3),
    Mutant("unfenced progress", {"task/record_progress": ("and t.claim_id = %(claim_id)s", "and %(claim_id)s::uuid is not null")}),
    Mutant("an unfenced checkpoint", {"task/record_checkpoint": ("and t.claim_id = %(claim_id)s", "and %(claim_id)s::uuid is not null")}),
    Mutant("a recovery without swap on the claim", {"task/recover": ("where t.claim_id = a.claim_id and t.state", "where t.state")}, seed=14),
    Mutant("a recovery without swap on the beat", {
        "task/recover": ("and s.beat_seq = %(holder_seq)s", "and %(holder_seq)s::bigint is not null"),
        "worker/end_supervisor": ("or s.beat_seq = %(beat_seq)s", "or true"),
    }, seed=5),
    Mutant("a cancel that a crash forgets", {"task/recover": ("when t.cancel_requested_at is not null then 'cancel'", "")}),
    Mutant("crashes that nobody counts", {
        "task/recover": ("crash_count = t.crash_count + (h.outcome is not distinct from 'CRASHED')::integer", "crash_count = t.crash_count"),
    }),
    Mutant("beats that echo the table", {
        "worker/beat": ("from lease l where not exists (select from held h", "from lease l where false and not exists (select from held h"),
    }, seed=5),
    Mutant("beats that name tasks, not claims", {
        "worker/beat": (
            "where not exists (select from lease l where l.claim_id = h.claim_id)",
            "where not exists (select from {schema}.tasks t where t.id = h.id and t.claim_id is not null)",
        ),
    }, seed=6),
    Mutant("beats that revive the ended", {"worker/beat": ("and s.ended_at is null", "")}, seed=4),
    Mutant("claims by the buried", {"task/claim": ("and ended_at is null for key share", "for key share")}, seed=54),
    Mutant("sweeps that forget the ended", {
        "task/leases_of_ended": ("where l.ended_at is not null", "where false and l.ended_at is not null"),
    }, seed=17),
    Mutant("no amnesty", part=(observer.Amnesty, "is_due", lambda *_, **__: False), seed=54),
    Mutant("a start-up that goes by names", part=(startup, "finding_on", lambda *_, **__: Proven("its host has my name")), seed=6),
    Mutant("no limit of crashes", part=(recovery, "is_exhausted", lambda *_, **__: False), seed=31),
]  # fmt: skip


@pytest.fixture(scope="module")
def stage(database_url: str) -> Iterator[Stage]:
    stage = Stage(Target.parse(database_url, schema=f"test_{uuid4().hex[:12]}"))
    yield stage
    stage.close()


@pytest.fixture(scope="module")
def clean() -> dict[int, bool]:
    """Which seeds the protocol as it is has passed."""
    return {}


def notices(stage: Stage, mutant: Mutant | None, seed: int) -> str | None:
    """What a storm with this seed found, if anything: a promise broken, or a constraint of the schema."""
    stage.make({} if mutant is None else mutant.texts)
    with pytest.MonkeyPatch.context() as patch:
        if mutant is not None and mutant.part is not None:
            patch.setattr(*mutant.part)
        try:
            storm(stage, seed)
        except (AssertionError, psycopg.Error) as red:
            return f"{type(red).__name__}: {red}"
    return None


@pytest.mark.timeout(400)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.why)
def test_a_mistake_is_noticed(mutant: Mutant, stage: Stage, clean: dict[int, bool]) -> None:
    """The seed beside the mutant noticed it when it was written; others are tried should the protocol have changed since."""
    for seed in (mutant.seed, *range(MOST_SEEDS)):
        if notices(stage, mutant, seed) is None:
            continue
        if seed not in clean:
            found = notices(stage, None, seed)
            assert found is None, f"the protocol as it is fails with seed {seed}: {found}"
            clean[seed] = True
        return
    pytest.fail(f"nobody noticed: {mutant.why}")
