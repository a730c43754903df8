"""Test the log records of failed attempts, at the default level and at DEBUG."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from everbeat.domain.task.policy import StoredPolicy
from everbeat.runtime.failure_log import FailureLog
from tests.worker.harness import Running, WorkerHarness


def subscribe(running: Running) -> None:
    running.subscribe(FailureLog())


def of_tasks(caplog: pytest.LogCaptureFixture) -> list[tuple[logging.LogRecord, Any]]:
    events = ((each, getattr(each, "everbeat_event", None)) for each in caplog.records)
    return [(record, event) for record, event in events if hasattr(event, "attempt")]


@pytest.mark.parametrize("name", ["raise_kind", "raise_in_thread", "raise_in_process"])
async def test_each_final_failure_is_logged_as_an_error_with_its_traceback(
    harness: WorkerHarness, caplog: pytest.LogCaptureFixture, name: str
) -> None:  # J4
    kinds = ["plain", "key", "task error", "huge", "unprintable", "exits when printed", "breaks isinstance"]
    with caplog.at_level(logging.INFO, logger="everbeat"):
        async with harness.worker() as running:
            subscribe(running)
            sent = {harness.send(name, kind=kind): kind for kind in kinds}
            await running.finished(*sent)
    told = {sent[event.task_id]: (record, event) for record, event in of_tasks(caplog)}
    assert set(told) == set(kinds)
    for kind, (record, event) in told.items():
        assert record.levelno == logging.ERROR, kind
        assert (event.name, event.attempt) == (name, 1)
        assert event.type, kind
        text = record.getMessage() + logging.Formatter().formatException(
            record.exc_info or (None, None, None)
        )
        assert len(text) < 100_000, kind
        if kind not in ("breaks isinstance", "exits when printed"):
            assert "_raise" in text, kind
    record, event = told["key"]
    assert (event.code, event.type) == ("KEY_MISSING", "KeyError")
    assert (record.exc_info is not None) == (name != "raise_in_process")


async def test_each_retry_is_logged_as_a_warning_and_the_last_failure_as_an_error(
    harness: WorkerHarness, caplog: pytest.LogCaptureFixture
) -> None:  # J4
    policy = StoredPolicy(max_retries=1, intervals=(1.0,), retry_for=("UNHANDLED_EXCEPTION",))
    with caplog.at_level(logging.INFO, logger="everbeat"):
        async with harness.worker() as running:
            subscribe(running)
            task_id = harness.send_with("raise_kind", {"kind": "plain"}, policy=policy.to_json())
            await running.until(lambda: len(harness.attempts(task_id)) == 2)
    (first, retry), (last, failure) = of_tasks(caplog)
    assert (first.levelno, retry.attempt, retry.retry_in_s, retry.type) == (
        logging.WARNING,
        1,
        1.0,
        "ValueError",
    )
    assert (last.levelno, failure.attempt) == (logging.ERROR, 2)


async def test_task_starts_and_ends_are_logged_only_at_debug(
    harness: WorkerHarness, caplog: pytest.LogCaptureFixture
) -> None:  # J4
    async with harness.worker() as running:
        subscribe(running)
        with caplog.at_level(logging.INFO, logger="everbeat"):
            await running.finished(harness.send("double", x=1))
            assert not [each for each in caplog.records if "task_" in each.getMessage()]
        assert not any(type(event).__name__ == "TaskStarted" for event in running.events)
        with caplog.at_level(logging.DEBUG, logger="everbeat"):
            await running.finished(harness.send("double", x=1))
    texts = [record.getMessage().split()[0] for record in caplog.records]
    assert [text for text in texts if text.startswith("task_")] == ["task_started", "task_finished"]


class Broken(logging.Handler):
    def __init__(self, problem: BaseException) -> None:
        super().__init__()
        self._problem = problem

    def emit(self, record: logging.LogRecord) -> None:
        raise self._problem


@pytest.mark.parametrize(
    "problem", [OSError("the log server is gone"), SystemExit(3)], ids=["raises", "exits"]
)
async def test_a_worker_survives_a_logging_handler_that_raises(
    harness: WorkerHarness, capsys: pytest.CaptureFixture[str], problem: BaseException
) -> None:  # J4
    logger, broken = logging.getLogger("everbeat"), Broken(problem)
    logger.addHandler(broken)
    try:
        async with harness.worker() as running:
            subscribe(running)
            for name in ("raise_kind", "raise_in_thread", "raise_in_process"):
                assert (await running.finished(harness.send(name, kind="plain")))["state"] == "FAILED"
            assert (await running.finished(harness.send("double", x=2)))["result"] == 4
    finally:
        logger.removeHandler(broken)
    assert capsys.readouterr().err.count("task_failure") == 3
