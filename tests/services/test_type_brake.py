"""A task type of which many runs crash within a minute is paused, and nothing else."""

from __future__ import annotations

from psycopg import sql

from everbeat.domain.policy import StoredPolicy
from everbeat.runtime.exit_report import ExitReport
from everbeat.services.type_brake import TaskTypePaused
from everbeat.store import pauses
from everbeat.store.leases import Claimed
from tests.services.conftest import Hands, Onlooker

CRASH = ExitReport(pid=77, exit_code=139)
AGAIN = StoredPolicy(on_crash="retry", max_crashes=10).to_json()


async def crash(onlooker: Onlooker, claimed: Claimed, **settings: object) -> None:
    recoverer = onlooker.recoverer(**settings)
    assert await recoverer.recover_lease(claimed.id, claimed.claim_id, CRASH) is not None


async def test_many_crashes_of_one_name_pause_it(onlooker: Onlooker, hands: Hands) -> None:
    for _ in range(2):
        await crash(onlooker, hands.running(), brake_after_crashes=3)
    assert hands.run(pauses.pauses()) == []
    await crash(onlooker, hands.running(), brake_after_crashes=3)
    (pause,) = hands.run(pauses.pauses())
    assert (pause.kind, pause.name, pause.paused_by, pause.crashes) == ("task", "work", "brake", 3)
    assert pause.reason == "3 or more of its tasks crashed within 60 s"
    (event,) = onlooker.told(TaskTypePaused)
    assert isinstance(event, TaskTypePaused)
    assert (event.name, event.crashes, event.window_s) == ("work", 3, 60.0)
    hands.send()
    assert hands.claim() == [], "claims skip it"
    hands.send("other")
    assert len(hands.claim(names=["other", "work"])) == 1
    hands.run(pauses.resume(pause, channel=hands.target.channel))
    assert len(hands.claim()) == 1


async def test_crashes_of_one_task_are_its_own_affair(onlooker: Onlooker, hands: Hands) -> None:
    task_id = hands.send(policy=AGAIN)
    for _ in range(5):
        (claimed,) = hands.claim()
        hands.start(claimed)
        await crash(onlooker, claimed, brake_after_crashes=3)
    assert hands.row(task_id, "crash_count") == 5
    assert hands.run(pauses.pauses()) == []


async def test_crashes_before_the_clock_was_set_back_do_not_count(
    onlooker: Onlooker, hands: Hands
) -> None:  # I14
    """An hour of them would be younger than the window."""
    for _ in range(2):
        await crash(onlooker, hands.running(), brake_after_crashes=3)
    hands.connection.execute(
        hands.plain("update {schema}.recoveries set noticed_at = now() + interval '59 min'")
    )
    await crash(onlooker, hands.running(), brake_after_crashes=3)
    assert hands.run(pauses.pauses()) == []


async def test_old_crashes_and_losses_do_not_count(onlooker: Onlooker, hands: Hands) -> None:
    for _ in range(3):
        await crash(onlooker, hands.running(), brake_after_crashes=4)
    hands.connection.execute(
        sql.SQL("update {}.recoveries set noticed_at = now() - interval '61 s'").format(
            sql.Identifier(hands.target.schema)
        )
    )
    for _ in range(3):
        await crash(onlooker, hands.running(), brake_after_crashes=4)
    assert hands.run(pauses.pauses()) == []
    for _ in range(5):
        hands.running("w2")
    await onlooker.recoverer(brake_after_crashes=4).recover_worker("w2", CRASH, died_at=0.0)
    assert hands.run(pauses.pauses()) == [], "five that died together are losses"
    await crash(onlooker, hands.running(), brake_after_crashes=4)
    assert len(hands.run(pauses.pauses())) == 1


async def test_the_brake_can_be_switched_off(onlooker: Onlooker, hands: Hands) -> None:
    for _ in range(3):
        await crash(onlooker, hands.running(), brake_after_crashes=None)
    assert hands.run(pauses.pauses()) == []
    assert onlooker.told(TaskTypePaused) == []
