"""A supervisor measures how long the tasks that it recovered wait until their code begins again."""

from __future__ import annotations

from typing import TypeVar
from uuid import uuid4

from msgspec.structs import replace

from everbeat.domain.task.policy import StoredPolicy
from everbeat.maintenance.reruns import LOOK_EVERY_S, RerunWatch
from everbeat.maintenance.series import RatesWriter
from everbeat.recovering.observer import RecoveryEnvironment
from everbeat.recovering.orders import Death
from everbeat.recovering.recoverer import Recoverer
from everbeat.store import tasks
from everbeat.store.statement import Statement
from tests.recovering.conftest import ManualObserver
from tests.store.conftest import StoreHarness

T = TypeVar("T")
AGAIN = StoredPolicy(on_crash="retry").to_json()
EXIT = Death(noticed_by="child_exit", cause="killed")


class Recorded:
    """Runs statements, and records their names."""

    def __init__(self, environment: RecoveryEnvironment) -> None:
        self._statements = environment.statements
        self.ran: list[str] = []

    async def run(self, statement: Statement[T], *, patience_s: float | None = None) -> T:
        self.ran.append(statement.name)
        return await self._statements.run(statement, patience_s=patience_s)


async def test_a_rerun_is_counted_once_and_costs_statements_only_while_its_task_waits(
    observer: ManualObserver, db: StoreHarness
) -> None:
    environment = observer.environment()
    recorded = Recorded(environment)
    writer = RatesWriter(environment)
    watch = RerunWatch(replace(environment, statements=recorded), writer)
    held = db.running(policy=AGAIN)
    lost = db.running()  # its policy fails it
    for each in (held, lost):
        await Recoverer(environment).recover_attempt(each.id, each.claim_id, EXIT)
    await watch.tick()
    assert recorded.ran == ["inspect/list_reruns"]
    assert writer.event_totals().reruns == {}
    db.connection.execute(db.plain("update {schema}.tasks set next_retry_at = null, enqueued_at = now()"))
    (claimed,) = db.claim()
    db.start(claimed)
    await observer.clock.advance(LOOK_EVERY_S)
    await watch.tick()
    (found,) = writer.event_totals().reruns.items()
    assert (found[0], sum(found[1].counts)) == (("child_exit",), 1)
    assert found[1].sum_s > 0
    for _ in range(3):
        await observer.clock.advance(LOOK_EVERY_S)
        await watch.tick()
    assert len(recorded.ran) == 2, "it waits for nothing"


async def test_a_task_that_waits_for_long_is_checked_seldom(
    observer: ManualObserver, db: StoreHarness
) -> None:
    environment = observer.environment()
    recorded = Recorded(environment)
    watch = RerunWatch(replace(environment, statements=recorded), RatesWriter(environment))
    held = db.running(policy=AGAIN)
    await Recoverer(environment).recover_attempt(held.id, held.claim_id, EXIT)
    for _ in range(40):
        await watch.tick()
        await observer.clock.advance(LOOK_EVERY_S)
    assert 5 < len(recorded.ran) < 20
    assert db.run(tasks.cancel(held.id, channel=db.target.channel, call=uuid4())) is not None
    for _ in range(40):
        await observer.clock.advance(LOOK_EVERY_S)
        await watch.tick()
    seen = len(recorded.ran)
    await observer.clock.advance(3_600)
    await watch.tick()
    assert len(recorded.ran) == seen, "a task that has ended is not followed"
