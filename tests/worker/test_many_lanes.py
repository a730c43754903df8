"""Test that thousands of lanes, and tasks of unknown functions in front, cost a worker little, and that it still finds everything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from everbeat.store import claims
from everbeat.store import tasks as stored
from everbeat.store.statement import Statement
from everbeat.store.tasks import MOST_DUE
from everbeat.testing.clock import ManualClock
from everbeat.worker.claim import claimer as claimer_module
from everbeat.worker.claim import query
from everbeat.worker.claim.claimer import PollTimer
from everbeat.worker.claim.query import ClaimCursor
from everbeat.worker.claim.slots import MOST_SEARCHED
from everbeat.worker.environment import WorkerEnvironment
from tests.worker.harness import WorkerHarness
from tests.worker.sample_tasks import gate
from tests.worker.test_claim_cursor import task
from tests.worker.test_declining import NEW_CODE
from tests.worker.test_slot_pool import pool_of

LEAST = query.LEAST_SEARCHED
QUEUES = [f"queue-{n:03}" for n in range(3 * MOST_SEARCHED)]


@pytest.fixture(autouse=True)
def fresh_gate() -> Iterator[None]:
    gate.reset()
    yield
    gate.opened.set()


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str] | None]:
    """Return the queues of each claim."""
    found: list[Sequence[str] | None] = []
    claim = claims.claim

    def watched(**options: Any) -> object:
        found.append(options["queues"])
        return claim(**options)

    monkeypatch.setattr(query.claims, "claim", watched)
    return found


def full(known: ClaimCursor, *, queue: str, due: list[str] | None = None, used: bool = True) -> None:
    known.learn(
        [task(1, queue=queue)] if due is None else [claims_of(queue, due)],
        is_full=True,
        used=used,
        looked_s=0.0,
    )


def claims_of(queue: str, due: list[str]) -> claims.Claimed:
    one = task(1, queue=queue)
    return claims.Claimed(
        **{name: getattr(one, name) for name in one.__struct_fields__} | {"due_queues": due}
    )


def test_claims_take_turns_with_the_due_queues_until_the_next_search_of_all() -> None:  # R4
    known = ClaimCursor(ManualClock())
    full(known, queue="queue-000", due=QUEUES, used=False)
    turns = [*QUEUES[1:], QUEUES[0]]  # the first was served before
    assert known.queues == turns[:LEAST]
    full(known, queue=turns[0])
    assert known.queues == turns[LEAST : 2 * LEAST]
    known.learn([], is_full=False, used=True, looked_s=0.0)  # these have no more
    assert known.queues == turns[2 * LEAST : 4 * LEAST]
    full(known, queue="queue-020")
    turns = [*turns[:LEAST], *turns[2 * LEAST : 4 * LEAST]]
    left = len(QUEUES) - 4 * LEAST
    sizes = []
    while known.queues is not None and len(sizes) < 99:
        sizes.append(len(known.queues))
        known.learn([], is_full=False, used=True, looked_s=0.0)
    assert sum(sizes) == left + len(turns)
    assert max(sizes) == MOST_SEARCHED
    assert known.queues is None
    assert known.now() == {}


def test_turns_continue_after_the_last_queue_that_was_served() -> None:  # R4
    known = ClaimCursor(ManualClock())
    full(known, queue="queue-100", due=QUEUES, used=False)
    assert known.queues == QUEUES[101 : 101 + LEAST]


async def test_a_search_of_all_queues_is_due_again_after_a_second() -> None:  # R4
    clock = ManualClock()
    known = ClaimCursor(clock)
    full(known, queue="queue-000", due=QUEUES, used=False)
    await clock.advance(query.TRUSTED_S + 0.1)
    assert known.now() == {}
    assert known.queues is None


async def test_a_drain_of_many_queues_searches_few_at_a_time_and_serves_all(
    harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch, searched: list[Sequence[str] | None]
) -> None:  # R4
    monkeypatch.setattr(query, "FIRST_CLAIM", 50)
    monkeypatch.setattr(query, "MOST_CLAIMED", 50)
    new = [
        stored.NewTask(id=stored_id, name="note", queue=queue, priority=0, args=b'{"word": "w"}')
        for queue in QUEUES
        for stored_id in (query.uuid4(), query.uuid4(), query.uuid4())
    ]
    harness.run(stored.insert_tasks(new, channel="unheard"))
    async with harness.worker(async_concurrency=50, prefetch=0) as running:
        await running.until(lambda: len(gate.journal) == len(new))
    few = [queues for queues in searched if queues is not None]
    assert few
    assert max(map(len, few)) <= MOST_SEARCHED


async def test_a_hint_makes_an_idle_worker_search_only_its_queue(
    harness: WorkerHarness, searched: list[Sequence[str] | None]
) -> None:  # R4
    async with harness.worker(hints=harness.silent_hints, poll_interval="5m") as running:
        await running.finished(harness.send("double", x=1))
        claimer = running.worker._claimer
        await running.until(
            lambda: not claimer._busy.locked() and not any(pool.has_more for pool in claimer._slots)
        )
        searched.clear()
        sent = harness.send_with("double", {"x": 2}, queue="mail")
        claimer.claim_soon("mail")
        await running.finished(sent)
        assert searched
        assert {tuple(queues or ()) for queues in searched[:1]} == {("mail",)}
        searched.clear()
        claimer.claim_soon()
        await running.until(lambda: len(searched) > 0)
        assert searched[0] is None


def test_queues_of_hints_add_up_until_any_queue_is_meant() -> None:  # R4
    pool = pool_of(slots=2, prefetch=0)
    pool.unsearched = set()
    assert not pool.has_more
    pool.expect("b")
    pool.expect("a")
    assert pool.has_more
    assert pool.take_unsearched() == ["a", "b"]
    assert not pool.has_more
    pool.expect("a")
    pool.expect()
    pool.expect("b")
    assert pool.take_unsearched() is None
    for n in range(MOST_SEARCHED + 1):
        pool.expect(str(n))
    assert pool.take_unsearched() is None


async def test_tasks_of_unknown_functions_in_front_are_marked_and_other_code_runs_them(
    harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:  # R4
    monkeypatch.setattr(query, "SLOW_S", 0.0)
    foreign = harness.send_many("foreign", [{"x": n} for n in range(2_100)])
    async with harness.worker() as running:
        await running.finished(harness.send("double", x=1))
        await running.until(
            lambda: (
                harness.query("select count(*) as n from {schema}.tasks where needs_id is not null")[0]["n"]
                == 2_000
            )
        )
    code = {"foreign": replace(NEW_CODE["double"], name="foreign")}
    async with harness.worker(definitions=code, async_concurrency=200) as other:
        await other.until(lambda: harness.states().get("COMPLETED") == 1 + len(foreign))
    ended = harness.query(
        "select a.outcome, count(*) as n from {schema}.attempts a join {schema}.tasks t on t.id = a.task_id "
        "where t.name = 'foreign' group by a.outcome"
    )
    counts = {str(one["outcome"]): one["n"] for one in ended}
    counts.pop("RELEASED", None)  # a slow machine can give claimed tasks back; marks end no attempt
    assert counts == {"COMPLETED": len(foreign)}


async def test_an_idle_poll_is_one_statement(
    harness: WorkerHarness, searched: list[Sequence[str] | None]
) -> None:
    asked: list[str] = []
    async with harness.worker(poll_interval="100ms", process_concurrency=0) as running:
        await running.finished(harness.send("double", x=1))
        session = running.worker._claimer._session
        run = session.run

        async def watched(statement: Statement[Any], **options: Any) -> Any:
            asked.append(statement.name)
            return await run(statement, **options)

        session.run = watched  # type: ignore[method-assign]
        claimer = running.worker._claimer
        await running.until(
            lambda: not claimer._timer._again_at and asked[-3:] == ["task/find_next_due"] * 3, timeout_s=30
        )
        searched.clear()
        asked.clear()
        await running.until(lambda: len(asked) >= 5)
        assert set(asked) == {"task/find_next_due"}
        assert searched == []


@pytest.mark.parametrize("sent", [{}, {"serial": "line"}, {"delay_ms": 300}, {"suspect": True}])
async def test_an_idle_poll_finds_a_task_without_a_hint(harness: WorkerHarness, sent: dict[str, Any]) -> None:
    is_suspect = sent.pop("suspect", False)
    async with harness.worker(hints=harness.silent_hints, poll_interval="200ms") as running:
        await running.finished(harness.send("double", x=1))
        claimer = running.worker._claimer
        await running.until(
            lambda: not claimer._busy.locked() and not any(pool.has_more for pool in claimer._slots)
        )
        late = harness.send_with("double", {"x": 2}, **sent)
        if is_suspect:
            harness.query("update {schema}.tasks set suspect = true where state = 'PENDING' returning id")
        row = await running.finished(late)
        assert (row["state"], row["result"]) == ("COMPLETED", 4)


async def test_a_task_that_becomes_due_makes_an_idle_worker_search_only_its_queue(
    harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch, searched: list[Sequence[str] | None]
) -> None:  # R4
    monkeypatch.setattr(claimer_module, "POLL_WITHOUT_HINTS_S", 300.0)
    async with harness.worker(hints=harness.silent_hints, poll_interval="5m") as running:
        claimer = running.worker._claimer
        await running.until(
            lambda: (
                not claimer._busy.locked()
                and not any(pool.has_more for pool in claimer._slots)
                and not claimer._timer._again_at
            )
        )
        soon = harness.send_with("double", {"x": 2}, queue="mail", delay_ms=1_500)
        later = harness.send_with("double", {"x": 1}, queue="films", delay_ms=2_000)
        claimer.claim_soon()
        await running.until(lambda: len(claimer._timer._due_at) == 2 and not claimer._busy.locked())
        searched.clear()
        await running.finished(soon)
        await running.finished(later)
        assert {tuple(queues or ()) for queues in searched} == {("mail",), ("films",)}


async def test_a_timer_returns_the_queues_that_are_due_and_all_for_other_reasons() -> None:  # R4
    clock = ManualClock()
    timer = PollTimer(environment_of(clock))
    timer.hints_arrive = True
    assert timer.take_due() is None  # the first poll
    timer.expect(1_000, "mail")
    timer.expect(2_000, "films")
    assert timer.take_due() == set()
    await clock.advance(1.1)
    assert timer.take_due() == {"mail"}
    assert timer.take_due() == set()
    timer.expect(500)
    await clock.advance(1.0)
    assert timer.take_due() is None
    assert timer.take_due() == set()
    for n in range(1_000):
        timer.expect(1_000 + n, f"queue-{n}")
    assert len(timer._due_at) <= 4 * MOST_DUE + 1
    await clock.advance(1.0015)
    assert timer.take_due() == {"queue-0"}


def environment_of(clock: ManualClock) -> WorkerEnvironment:
    config = SimpleNamespace(poll_interval_s=300.0)
    found = SimpleNamespace(clock=clock, plan=SimpleNamespace(config=config))
    return cast(WorkerEnvironment, found)
