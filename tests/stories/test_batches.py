"""A batch grows until it is sealed, also from its own tasks, and its callbacks run once although processes are killed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from types import ModuleType

import pytest

from everbeat import Batch
from everbeat.errors import BatchNotFound, BatchSealed
from tests.stories.scenario import Scenario, program_of

pytestmark = [pytest.mark.story, pytest.mark.timeout(180)]

SMALL = {"processes": 1, "process_concurrency": 2, "async_concurrency": 4, "thread_concurrency": 1}


@pytest.fixture
def gathering(scenario: Scenario) -> Iterator[ModuleType]:
    with program_of(scenario, "gathering") as program:
        yield program


def new_batch(program: ModuleType, name: str = "import-7") -> Batch:
    batch: Batch = program.app.batch(
        name, on_end=program.report.call("on_end"), on_success=program.report.call("on_success")
    )
    return batch


def callbacks(scenario: Scenario) -> list[dict[str, object]]:
    return scenario.query("select id, state from {schema}.tasks where name like '%%report' order by id")


def reports(scenario: Scenario) -> Counter[str]:
    return Counter(line["step"] for line in scenario.effects() if line["step"].startswith("on_"))


@pytest.mark.long
def test_a_batch_that_grows_from_its_own_tasks_ends_once_under_kills(
    scenario: Scenario, gathering: ModuleType
) -> None:  # K11
    tree = scenario.ready_tree(program="gathering", worker=SMALL)
    with new_batch(gathering) as batch:
        batch.send(gathering.grow.call("x", 3))
    for share in (2, 6, 10):
        scenario.until(
            lambda share=share: len({line["step"] for line in scenario.effects()}) >= share,
            within=60,
            what=f"{share} tasks have started",
        )
        tree.kill()
        tree = scenario.ready_tree(program="gathering", worker=SMALL)
    ended = batch.wait_end(timeout=90)
    assert (ended.total, ended.completed, ended.waiting, ended.running) == (15, 15, 0, 0)
    for sent in (ended.on_end_id, ended.on_success_id):
        assert sent is not None
        gathering.app.handle(sent).result(timeout=30)
    assert len(callbacks(scenario)) == 2
    names = {line["step"] for line in scenario.effects() if line["step"].startswith("grow")}
    assert len(names) == 15


def test_the_callbacks_run_once_although_workers_are_killed_around_the_end(
    scenario: Scenario, gathering: ModuleType
) -> None:  # K11
    tree = scenario.ready_tree(program="gathering", worker=SMALL)
    batches = []
    for number in range(8):
        with new_batch(gathering, f"number {number}") as batch:
            batch.send_many(gathering.load.call(each) for each in range(60))
        batches.append(batch)
        tree.kill()
        tree = scenario.ready_tree(program="gathering", worker=SMALL)
    for batch in batches:
        ended = batch.wait_end(timeout=60)
        assert (ended.total, ended.completed) == (60, 60)
    scenario.until(
        lambda: len([one for one in callbacks(scenario) if one["state"] == "COMPLETED"]) == 16,
        within=60,
        what="all callbacks have run",
    )
    assert len(callbacks(scenario)) == 16


def test_a_failed_task_prevents_on_success_but_not_on_end(scenario: Scenario, gathering: ModuleType) -> None:
    scenario.ready_tree(program="gathering", worker=SMALL)
    with new_batch(gathering) as batch:
        batch.send(gathering.load.call(1))
        batch.send(gathering.fail.call(3))
        assert batch.status().ended is False
    ended = batch.wait_end(timeout=60)
    assert (ended.total, ended.completed, ended.failed) == (2, 1, 1)
    assert ended.on_end_id is not None
    assert gathering.app.handle(ended.on_end_id).result(timeout=30) == "on_end"
    assert reports(scenario) == Counter({"on_end": 1})


def test_an_empty_batch_ends_at_once_when_it_is_sealed(scenario: Scenario, gathering: ModuleType) -> None:
    scenario.ready_tree(program="gathering", worker=SMALL)
    with new_batch(gathering) as batch:
        pass
    assert batch.wait_end(timeout=5).total == 0
    scenario.until(lambda: sum(reports(scenario).values()) == 2, within=20, what="both callbacks have run")


def test_an_open_batch_waits_for_its_seal_and_refuses_tasks_afterwards(
    scenario: Scenario, gathering: ModuleType
) -> None:
    scenario.ready_tree(program="gathering", worker=SMALL)
    batch = new_batch(gathering)
    with pytest.raises(BatchNotFound, match="never opened"):
        batch.send(gathering.load.call(1))
    batch.open()
    assert batch.send(gathering.load.call(1)).result(timeout=30) == 1
    elsewhere = gathering.app.open_batch(str(batch.id))
    assert elsewhere.send(gathering.load.call(2)).result(timeout=30) == 2
    scenario.until(lambda: batch.status().completed == 2, within=10, what="both are counted")
    assert not batch.status().ended
    elsewhere.seal()
    batch.seal()
    assert batch.wait_end(timeout=10).total == 2
    with pytest.raises(BatchSealed):
        batch.send_many([gathering.load.call(3)])
    assert scenario.query("select count(*) as n from {schema}.tasks where name like '%%load'")[0]["n"] == 2


def test_a_cancelled_batch_cancels_its_waiting_tasks_and_reports_its_end(
    scenario: Scenario, gathering: ModuleType
) -> None:
    with new_batch(gathering) as batch:
        batch.send_many(gathering.load.call(number) for number in range(5))
    assert batch.cancel().cancelled == 5
    assert batch.cancel().cancelled == 5
    scenario.ready_tree(program="gathering", worker=SMALL)
    assert batch.wait_end(timeout=20).cancelled == 5
    scenario.until(lambda: reports(scenario) == Counter({"on_end": 1}), within=20, what="on_end has run")


def test_a_block_that_raises_leaves_its_batch_open(scenario: Scenario, gathering: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="no row") as raised, new_batch(gathering) as batch:
        raise RuntimeError("no row")
    assert not batch.status().sealed
    assert "stays open" in raised.value.__notes__[0]
