"""Test unanswered claims: a smaller claim follows, and neither other claims nor the end of the worker wait."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest

from everbeat.protocol import Drain
from everbeat.store.session import Session
from everbeat.worker import worker
from everbeat.worker.claim import query
from everbeat.worker.claim.query import FIRST_CLAIM, ClaimSize
from tests.worker.harness import WorkerHarness
from tests.worker.proxy import Proxy, statement_marker

CLAIM = statement_marker("task/claim_tasks")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the 35 s after which the worker stops waiting for an answer to one second."""
    monkeypatch.setattr(worker, "Session", partial(Session, reply_timeout_s=1.0))
    monkeypatch.setattr(query, "TOO_LONG_S", 0.5)


@asynccontextmanager
async def behind_a_proxy(harness: WorkerHarness) -> AsyncIterator[Proxy]:
    async with Proxy.before(harness.target) as proxy:
        direct, harness.target = harness.target, proxy.target
        try:
            yield proxy
        finally:
            harness.target = direct


@pytest.mark.usefixtures("impatient")
async def test_tasks_of_an_unanswered_claim_are_released_and_the_next_claim_is_smaller(
    harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:  # promise 1
    shrunk: list[int] = []
    unanswered = ClaimSize.unanswered

    def watched(self: ClaimSize) -> None:
        unanswered(self)
        shrunk.append(self.rows)

    monkeypatch.setattr(ClaimSize, "unanswered", watched)
    sent = harness.send_many("note", [{"word": str(n)} for n in range(40)])
    async with behind_a_proxy(harness) as proxy:
        proxy.hold_reply(CLAIM)
        async with harness.worker(hints=harness.silent_hints, async_concurrency=10, prefetch=10) as running:
            await running.finished(*sent)
    assert shrunk == [FIRST_CLAIM // 4]
    assert harness.states() == {"COMPLETED": 40}
    outcomes = sorted([each["outcome"] for each in harness.attempts(one)] for one in sent)
    assert outcomes == [["COMPLETED"]] * 30 + [["RELEASED", "COMPLETED"]] * 10


@pytest.mark.usefixtures("impatient")
async def test_a_claim_that_fails_quickly_is_repeated_with_the_same_size(harness: WorkerHarness) -> None:
    async with behind_a_proxy(harness) as proxy:
        sent = harness.send_many("note", [{"word": str(n)} for n in range(40)])
        proxy.lose_reply(CLAIM)
        async with harness.worker(hints=harness.silent_hints) as running:
            await running.finished(*sent)
    assert proxy.lost == 1
    assert [len(harness.attempts(one)) for one in sent] == [1] * 40


async def test_an_unanswered_claim_does_not_delay_the_end_of_the_worker(harness: WorkerHarness) -> None:
    harness.send_many("note", [{"word": str(n)} for n in range(40)])
    async with behind_a_proxy(harness) as proxy:
        proxy.hold_reply(CLAIM)
        async with harness.worker(hints=harness.silent_hints, async_concurrency=10, prefetch=10) as running:
            await running.until(lambda: harness.states().get("RUNNING") == 10)
            began_at = time.monotonic()
            running.worker.obey(Drain(20_000))
            assert await running.left() == 0
            took_s = time.monotonic() - began_at
    print(f"left {took_s:.1f} s after it was told to, with a claim under way")
    assert harness.states() == {"PENDING": 40}
    assert took_s < 10


async def test_a_claim_that_waits_for_a_lock_does_not_delay_the_end_of_the_worker(
    harness: WorkerHarness,
) -> None:
    harness.send("note", word="later")
    with harness.holding("lock table {schema}.pauses in access exclusive mode"):
        async with harness.worker(hints=harness.silent_hints) as running:
            await running.until(lambda: running.worker._claimer._query._is_running)
            running.worker.obey(Drain(20_000))
            assert await running.left() == 0
    assert harness.states() == {"PENDING": 1}
