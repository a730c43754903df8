"""The classic mistakes, put into the real statements and the real caretakers: the machine of `stateful` must notice each of them.

A mutant counts as caught only because the protocol as it is passes the same seed. What the machine cannot show is the model's
(`test_model`): everybody who beats for a task of the same id, in a design in which beats renew leases one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from everbeat.domain import recovery
from everbeat.services import observer, startup
from everbeat.services.proof import Proven
from everbeat.store.target import Target
from tests.protocol.stateful.machine import Machine
from tests.protocol.stateful.stage import Stage

NOTICING = settings(
    max_examples=60, stateful_step_count=30, deadline=None, database=None, suppress_health_check=list(HealthCheck),
    phases=(Phase.generate,), report_multiple_bugs=False,
)  # fmt: skip
SEEDS = (1, 2, 3)
HELD = "where t.claim_id = a.claim_id and t.state = 'RUNNING'"


@dataclass(frozen=True)
class Mutant:
    """A mistake: texts in statements (what stands there, what the mutant has instead), or a part of a caretaker."""

    why: str
    texts: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    part: tuple[Any, str, Any] | None = None
    seed: int = 1


MUTANTS = [
    Mutant("settle by id alone", {"task/settle": (HELD, "where true")}),
    Mutant("settle by state", {"task/settle": (HELD, "where t.state = 'RUNNING'")}),
    # What a claim hands out is made of nothing but the worker's name: every guard by claim_id is then one by name.
    Mutant("every guard by worker name", {"task/claim": ("gen_random_uuid()", "md5(%(worker_id)s)::uuid")}),
    Mutant("a claim id without chance in it", {"task/claim": ("gen_random_uuid()", "md5(t.id::text || t.fence)::uuid")}),
    Mutant("an unfenced start", {"task/start": ("where t.claim_id = a.claim_id", "where true")}),
    Mutant("an unfenced release", {"task/release": ("where t.claim_id = a.claim_id and", "where")}),
    Mutant("unfenced progress", {"task/record_progress": ("and t.claim_id = %(claim_id)s", "and %(claim_id)s::uuid is not null")}),
    Mutant("an unfenced checkpoint", {"task/record_checkpoint": ("and t.claim_id = %(claim_id)s", "and %(claim_id)s::uuid is not null")}),
    Mutant("a recovery without swap on the claim", {"task/recover": ("where t.claim_id = a.claim_id and t.state", "where t.state")}),
    Mutant("a recovery without swap on the beat", {
        "task/recover": ("and s.beat_seq = %(holder_seq)s", "and %(holder_seq)s::bigint is not null"),
        "worker/end_supervisor": ("or s.beat_seq = %(beat_seq)s", "or true"),
    }),
    Mutant("a cancel that a crash forgets", {"task/recover": ("when t.cancel_requested_at is not null then 'cancel'", "")}),
    Mutant("crashes that nobody counts", {"task/recover": ("crash_count = t.crash_count + (h.outcome is not distinct from 'CRASHED')::integer", "crash_count = t.crash_count")}),
    Mutant("beats that echo the table", {"worker/beat": ("select 'phantom', l.id, l.claim_id, l.claimed_by_worker_id from lease l where", "select 'phantom', l.id, l.claim_id, l.claimed_by_worker_id from lease l where false and")}),
    Mutant("beats that name tasks, not claims", {"worker/beat": ("held h where not exists (select from lease l where l.claim_id = h.claim_id)", "held h where not exists (select from {schema}.tasks t where t.id = h.id and t.claim_id is not null)")}),
    Mutant("beats that revive the ended", {"worker/beat": ("and s.ended_at is null", "")}),
    Mutant("claims by the buried", {"task/claim": ("and ended_at is null for key share", "for key share")}),
    Mutant("sweeps that forget the ended", {"task/leases_of_ended": ("where l.ended_at is not null", "where false and l.ended_at is not null")}),
    Mutant("no amnesty", part=(observer.Amnesty, "is_due", lambda *_, **__: False)),
    Mutant("a start-up that goes by names", part=(startup, "finding_on", lambda *_, **__: Proven("its host has my name"))),
    Mutant("no limit of crashes", part=(recovery, "is_exhausted", lambda *_, **__: False)),
]  # fmt: skip
QUICK = {mutant.why for mutant in MUTANTS}


@contextmanager
def stage_with(mutant: Mutant | None, url: str, schema: str) -> Iterator[Stage]:
    """A schema of its own in which the mutant lives, or the protocol as it is."""
    stage = Stage(Target.parse(url, schema=schema), {} if mutant is None else mutant.texts)
    with pytest.MonkeyPatch.context() as patch:
        if mutant is not None and mutant.part is not None:
            patch.setattr(*mutant.part)
        try:
            yield stage
        finally:
            stage.close()


def notices(mutant: Mutant | None, with_seed: int, *, url: str, schema: str) -> str | None:
    """What the machine found, if anything."""
    with stage_with(mutant, url, schema) as stage:
        machine = seed(with_seed)(type("MachineOnStage", (Machine,), {"stage": stage, "tally": Counter()}))
        try:
            run_state_machine_as_test(machine, settings=NOTICING)
        except (AssertionError, psycopg.Error) as red:  # a promise, or a constraint of the schema
            return f"{type(red).__name__}: {red}"
    return None
