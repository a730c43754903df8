"""The log of an attempt's code is stored: bounded, harmless, once, and without slowing the code or its outcome."""

from __future__ import annotations

import asyncio
import logging
from typing import Any
from uuid import UUID

import pytest

from everbeat.runtime.log_buffer import MESSAGE_BYTES, NEWEST_PARTS, PART_LINES
from everbeat.worker.log_recorder import LogRecorder
from tests.worker import sample_logs
from tests.worker.harness import WorkerHarness
from tests.worker.proxy import Proxy, statement_marker
from tests.worker.sample_tasks import DEFINITIONS, gate

assert sample_logs.AGAIN


def stored(harness: WorkerHarness, task_id: UUID) -> list[dict[str, Any]]:
    return harness.query(
        "select * from {schema}.attempt_logs where task_id = %s order by attempt, first", task_id
    )


def lines(harness: WorkerHarness, task_id: UUID, attempt: int = 1) -> list[dict[str, Any]]:
    return [line for row in stored(harness, task_id) if row["attempt"] == attempt for line in row["lines"]]


def messages(harness: WorkerHarness, task_id: UUID, attempt: int = 1) -> list[str]:
    return [line["message"] for line in lines(harness, task_id, attempt)]


@pytest.mark.parametrize("name", ["log_async", "log_in_thread", "log_in_process"])
async def test_each_attempt_has_its_own_log_with_level_logger_and_traceback(
    harness: WorkerHarness, name: str
) -> None:
    async with harness.worker() as running:
        task_id = harness.send(name)
        await running.until(lambda: harness.task(task_id)["state"] == "COMPLETED")
        await running.until(lambda: len(messages(harness, task_id, 2)) == 3)
        for attempt in (1, 2):
            expected = [f"begins attempt {attempt}", "cannot pack", "in another thread"]
            assert messages(harness, task_id, attempt) == expected
    first = lines(harness, task_id)
    assert [(line["number"], line["level"], line["logger"]) for line in first] == [
        (1, "INFO", "shop.orders"), (2, "ERROR", "shop.orders"), (3, "WARNING", "shop.orders"),
    ]  # fmt: skip
    assert "ValueError: no stock" in first[1]["exception"]
    assert "4242" not in str(first), "what a caller passes in `extra` is not captured"
    assert [handler.__class__.__name__ for handler in logging.root.handlers].count("CaptureHandler") == 0


async def test_a_task_can_switch_capture_on_or_off_and_the_worker_decides_for_the_others(
    harness: WorkerHarness,
) -> None:
    async with harness.worker(capture_logs="error") as running:
        ids = [harness.send(name) for name in ("log_nothing", "log_as_the_worker_says", "log_in_thread")]
        await running.until(lambda: all(messages(harness, each) for each in ids[1:]))
        assert messages(harness, ids[1]) == ["problem"]
        assert messages(harness, ids[2])[0] == "begins attempt 1"
        await running.finished(ids[0])
    assert stored(harness, ids[0]) == []


async def test_without_the_option_there_is_no_handler_and_no_statement(
    harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "log_as_the_worker_says"
    off = {name: DEFINITIONS[name]}
    seen: list[str] = []
    monkeypatch.setattr(LogRecorder, "note", lambda *_: seen.append("note"))
    async with harness.worker(definitions=off) as running:
        task_id = harness.send(name)
        await running.finished(task_id)
        assert [type(each).__name__ for each in logging.root.handlers].count("CaptureHandler") == 0
        sessions = "select application_name as n from pg_stat_activity where application_name like %s"
        # Sessions of an earlier test can end late.
        await running.until(lambda: len(harness.query(sessions, "%worker %")) <= 2)
    assert (seen, stored(harness, task_id)) == ([], [])


@pytest.mark.parametrize("name", ["flood_in_thread", "flood_in_process"])
@pytest.mark.parametrize("count", [15_000, pytest.param(100_000, marks=pytest.mark.long)])
async def test_a_flood_keeps_its_first_and_newest_lines(
    harness: WorkerHarness, name: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])  # those of pytest are slower than the code under test
    async with harness.worker() as running:
        task_id = harness.send(name, lines=count)
        row = await running.finished(task_id)
        print(f"{name}: the code took {row['result']:.2f} s for {count:,} lines")
        await running.until(lambda: messages(harness, task_id)[-1:] == [text(count)])
    rows = stored(harness, task_id)
    numbers = [line["number"] for line in lines(harness, task_id)]
    assert numbers == sorted(set(numbers))
    assert numbers[:360] == [*range(1, 361)], "the first part is kept"
    newest = numbers[-(NEWEST_PARTS - 1) * 90 :]
    assert newest == [*range(newest[0], count + 1)], "the newest part is kept without gaps"
    assert len(rows) <= 16
    assert all(len(row["lines"]) <= PART_LINES for row in rows)
    size = harness.query(
        "select sum(octet_length(lines::text)) as n from {schema}.attempt_logs where task_id = %s", task_id
    )
    assert size[0]["n"] < 500_000


def text(n: int) -> str:
    return f"line {n} of the flood, which is as long as a usual line of a log"


async def test_hostile_records_are_stored_harmlessly(harness: WorkerHarness) -> None:
    async with harness.worker() as running:
        task_id = harness.send("log_hostile")
        await running.finished(task_id)
        await running.until(lambda: len(messages(harness, task_id)) == 6)
    found = lines(harness, task_id)
    assert found[0]["message"] == "nul \\x00, surrogate \\ud800, escape \x1b[31m, override \u202e"
    assert len(found[1]["message"]) <= MESSAGE_BYTES + 40
    assert "characters cut" in found[1]["message"]
    assert found[2]["message"] == "<the message cannot be formatted: TypeError>"
    assert "cannot be formatted" in found[3]["message"]
    assert len(found[4]["logger"]) <= 240
    assert found[5]["message"] == "5"


async def test_the_log_of_a_killed_task_process_has_the_last_lines_before_the_kill(
    harness: WorkerHarness,
) -> None:
    async with harness.worker() as running:
        task_id = harness.send("log_and_die")
        await running.until(
            lambda: harness.task(task_id)["state"] == "FAILED" and bool(messages(harness, task_id))
        )
    assert messages(harness, task_id) == ["before the crash of attempt 1"]


async def test_lines_of_an_outage_are_stored_after_it_and_once_if_a_reply_is_lost(
    harness: WorkerHarness,
) -> None:
    async with Proxy.before(harness.target) as proxy:
        straight, harness.target = harness.target, proxy.target
        try:
            async with harness.worker() as running:
                task_id = harness.send("log_when_told")
                await running.until(lambda: bool(messages(harness, task_id)))
                proxy.cut()
                gate.opened.set()
                await running.until(lambda: gate.journal == ["waits", "logged"])
                proxy.lose_reply(statement_marker("log/write_parts"))
                proxy.mend()
                await running.finished(task_id)
                await running.until(lambda: messages(harness, task_id) == ["before", "after"])
                await running.until(lambda: proxy.lost == 1)
        finally:
            harness.target = straight
    assert messages(harness, task_id) == ["before", "after"]


async def test_a_locked_table_of_logs_delays_no_outcome(harness: WorkerHarness) -> None:
    async with harness.worker() as running:
        with harness.holding("lock table {schema}.attempt_logs in exclusive mode"):
            tasks = [harness.send("log_in_thread"), harness.send("log_as_the_worker_says")]
            row = await running.finished(tasks[1])
            assert row["state"] == "COMPLETED"
            await running.until(lambda: harness.task(tasks[0])["state"] == "COMPLETED")
            assert stored(harness, tasks[0]) == []
        await running.until(lambda: len(messages(harness, tasks[0], 2)) == 3)


async def test_the_code_of_a_lost_lease_logs_only_under_its_own_claim(harness: WorkerHarness) -> None:
    async with harness.worker() as running:
        task_id = harness.send("log_when_told")
        await running.until(lambda: bool(messages(harness, task_id)))
        (before,) = stored(harness, task_id)
        harness.recover(task_id)
        gate.opened.set()
        await running.until(lambda: messages(harness, task_id) == ["before", "after"])
    (after,) = stored(harness, task_id)
    assert (after["claim_id"], after["attempt"]) == (before["claim_id"], 1)
    row = harness.task(task_id)
    assert (row["state"], row["claim_id"]) == ("FAILED", None)


async def test_the_log_of_a_deleted_task_is_not_stored(harness: WorkerHarness) -> None:
    async with harness.worker() as running:
        task_id = harness.send("log_when_told")
        await running.until(lambda: bool(messages(harness, task_id)))
        harness.connection.execute(f'delete from "{harness.target.schema}".tasks'.encode())
        harness.connection.execute(f'delete from "{harness.target.schema}".attempt_logs'.encode())
        gate.opened.set()
        await running.until(lambda: gate.journal == ["waits", "logged"])
        await asyncio.sleep(1.2)  # longer than the time between two writes
    assert stored(harness, task_id) == []
