"""A claim whose answer does not come is followed by a smaller one, and holds up neither the others nor the worker's end."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest

from everbeat.store.session import Session
from everbeat.worker import asking, worker
from everbeat.worker.portion import FIRST_CLAIM, Portion
from everbeat.worker.protocol import Drain
from tests.worker.proxy import Proxy
from tests.worker.stand import Stand

CLAIM = b"-- Claims due"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second stands for the 35 after which an answer is given up."""
    monkeypatch.setattr(worker, "Session", partial(Session, reply_timeout_s=1.0))
    monkeypatch.setattr(asking, "TOO_LONG_S", 0.5)


@asynccontextmanager
async def behind_a_proxy(stand: Stand) -> AsyncIterator[Proxy]:
    async with Proxy.before(stand.target) as proxy:
        direct, stand.target = stand.target, proxy.target
        try:
            yield proxy
        finally:
            stand.target = direct


@pytest.mark.usefixtures("impatient")
async def test_what_it_took_is_given_back_and_a_smaller_one_follows(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:  # promise 1
    shrunk: list[int] = []
    unanswered = Portion.unanswered

    def watched(self: Portion) -> None:
        unanswered(self)
        shrunk.append(self.rows)

    monkeypatch.setattr(Portion, "unanswered", watched)
    sent = stand.send_many("note", [{"word": str(n)} for n in range(40)])
    async with behind_a_proxy(stand) as proxy:
        proxy.hold_reply(CLAIM)
        async with stand.worker(wake=stand.silent_wake, async_concurrency=10, prefetch=10) as running:
            await running.finished(*sent)
    assert shrunk == [FIRST_CLAIM // 4]
    assert stand.states() == {"COMPLETED": 40}
    outcomes = sorted([each["outcome"] for each in stand.attempts(one)] for one in sent)
    assert outcomes == [["COMPLETED"]] * 30 + [["RELEASED", "COMPLETED"]] * 10


@pytest.mark.usefixtures("impatient")
async def test_a_claim_that_fails_soon_is_repeated_as_it_was(stand: Stand) -> None:
    async with behind_a_proxy(stand) as proxy:
        sent = stand.send_many("note", [{"word": str(n)} for n in range(40)])
        proxy.lose_reply(CLAIM)
        async with stand.worker(wake=stand.silent_wake) as running:
            await running.finished(*sent)
    assert proxy.lost == 1
    assert [len(stand.attempts(one)) for one in sent] == [1] * 40


async def test_it_does_not_hold_up_the_end_of_the_worker(stand: Stand) -> None:
    stand.send_many("note", [{"word": str(n)} for n in range(40)])
    async with behind_a_proxy(stand) as proxy:
        proxy.hold_reply(CLAIM)
        async with stand.worker(wake=stand.silent_wake, async_concurrency=10, prefetch=10) as running:
            await running.until(lambda: stand.states().get("RUNNING") == 10)
            began_at = time.monotonic()
            running.worker.obey(Drain(20_000))
            assert await running.left() == 0
            took_s = time.monotonic() - began_at
    print(f"left {took_s:.1f} s after it was told to, with a claim under way")
    assert stand.states() == {"PENDING": 40}
    assert took_s < 10


async def test_nor_does_one_that_waits_for_a_lock(stand: Stand) -> None:
    stand.send("note", word="later")
    with stand.holding("lock table {schema}.pauses in access exclusive mode"):
        async with stand.worker(wake=stand.silent_wake) as running:
            await running.until(lambda: running.worker._claimer._asking._is_asking)
            running.worker.obey(Drain(20_000))
            assert await running.left() == 0
    assert stand.states() == {"PENDING": 1}
