"""Actions of holders and former holders with their claims, and the expected replies."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal, TypeVar, cast

from everbeat.store import leases, steps
from everbeat.store.leases import AttemptOutcome, Settlement
from everbeat.store.statement import Statement
from tests.protocol.stateful.database import FaultyDatabase
from tests.protocol.stateful.ledger import Grant, Ledger

T = TypeVar("T")
Fate = Literal["answered", "reply lost", "commit lost"]
VERBS = (
    "start", "complete", "fail", "fail and retry", "cancelled", "hand back", "release", "progress", "checkpoint", "check",
)  # fmt: skip
_OUTCOMES = {
    "complete": "COMPLETED", "fail": "FAILED", "fail and retry": "FAILED", "cancelled": "CANCELLED", "hand back": "RELEASED",
}  # fmt: skip


@dataclass
class HolderActions:
    """Perform actions. `fate`: the reply arrives, only the commit happens, or the reply arrives and a failover loses the commit."""

    database: FaultyDatabase
    ledger: Ledger
    tally: Counter[str]

    def perform(self, grant: Grant, verb: str, fate: Fate = "answered") -> None:
        """Perform one action with a remembered claim; assert the reply."""
        self.tally[f"{verb} by a {'holder' if self.ledger.holds(grant) else 'zombie'}"] += 1
        self.tally[fate] += 1
        match verb:
            case "start":
                self._start(grant, fate)
            case "release":
                self._release(grant, fate)
            case "progress" | "checkpoint" | "check":
                self._touch(grant, verb)
            case _:
                self._settle(grant, verb, fate)

    def _ask(self, statement: Statement[T], fate: Fate) -> T:
        return (
            self.database.run_and_lose(statement) if fate == "commit lost" else self.database.run(statement)
        )

    def _start(self, grant: Grant, fate: Fate) -> None:
        entry, holds = self.ledger.entries[grant.task], self.ledger.holds(grant)
        alone = {grant.claimed.claim_id} if grant.claimed.suspect else set()
        statement = leases.start([grant.lease], channel=self.database.target.channel, alone=alone)
        verdict = self._ask(statement, fate)[grant.claimed.claim_id].verdict
        expected = "lost"
        if holds:
            expected = "expired" if entry.state == "CLAIMED" and entry.is_late else "started"
        assert verdict == expected, f"a start of {grant.task} was {verdict}, not {expected}"
        if not holds or fate == "commit lost":
            grant.phase = "running" if verdict == "started" else grant.phase
            return
        if fate == "answered" and verdict == "started":
            grant.phase = "running"
        if verdict == "expired":
            entry.free("EXPIRED")
        elif entry.state == "CLAIMED":
            entry.state, entry.alone = "RUNNING", bool(alone)
            entry.attempt += 1

    def _settle(self, grant: Grant, verb: str, fate: Fate) -> None:
        entry, outcome = self.ledger.entries[grant.task], _OUTCOMES[verb]
        again = verb == "fail and retry"
        settlement = Settlement(
            id=grant.task, claim_id=grant.claimed.claim_id, outcome=cast(AttemptOutcome, outcome),
            result=b"1" if outcome == "COMPLETED" else None, error=b'{"code": "BAD"}' if outcome == "FAILED" else None,
            retry_in_ms=0 if again else None,
        )  # fmt: skip
        verdict = self._verdict(settlement, fate, at_once=grant.claimed.fence % 3 == 0)
        if not self.ledger.holds(grant) or entry.state != "RUNNING":
            is_same = grant.done == outcome or (grant.done == "CANCELLED" and outcome != "COMPLETED")
            expected = "already" if is_same else "lost"
            assert verdict == expected, f"a settle ({verb}) of {grant.task} was {verdict}, not {expected}"
            return
        if fate == "commit lost":
            return
        state = entry.settled(outcome, again=again)
        assert verdict == state, f"a settle ({verb}) of {grant.task} made it {verdict}, not {state}"
        grant.done = "CANCELLED" if state == "CANCELLED" else outcome

    def _verdict(self, settlement: Settlement, fate: Fate, *, at_once: bool) -> str:
        """Settle as a worker does: a success by its own statement first; with `at_once`, as a commit in user code does."""
        channel = self.database.target.channel
        if settlement.outcome == "COMPLETED" and not at_once:
            landed = self._ask(leases.complete([settlement], channel=channel), fate)
            assert set(landed) <= {settlement.claim_id}
            if landed:
                return "COMPLETED"
        return self._ask(leases.settle([settlement], channel=channel), fate)[settlement.claim_id]

    def _release(self, grant: Grant, fate: Fate) -> None:
        entry = self.ledger.entries[grant.task]
        released = self._ask(leases.release([grant.lease], channel=self.database.target.channel), fate)
        expected = [grant.task] if self.ledger.holds(grant) and entry.state == "CLAIMED" else []
        assert released == expected, f"a release of {grant.task} answered {released}"
        if released and fate != "commit lost":
            entry.free("PENDING")

    def _touch(self, grant: Grant, verb: str) -> None:
        """Use statements that change no state: only the holder of the claim may succeed."""
        entry, holds = self.ledger.entries[grant.task], self.ledger.holds(grant)
        if verb == "check":
            found = self.database.run(leases.check_leases([grant.lease]))
            expected = [] if holds and not entry.cancel else [(*grant.lease, "cancel" if holds else "lost")]
            assert found == expected, f"a check of {grant.task} answered {found}"
            return
        said = f'{{"stage": "{grant.claimed.claim_id}"}}'.encode()
        statement = (
            leases.record_progress(*grant.lease, said)
            if verb == "progress"
            else steps.record_checkpoint(*grant.lease, said, number=1, progress=None)
        )
        assert self.database.run(statement) is (holds and entry.state == "RUNNING"), f"{verb} of {grant.task}"
