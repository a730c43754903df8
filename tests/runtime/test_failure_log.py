"""Test the log records of failed attempts: one each up to a limit, and folded records above it."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest

from everbeat.domain.task.outcome import error_from_exception, error_to_json
from everbeat.runtime.events import TaskFinished, WorkerStarted
from everbeat.runtime.failure_log import MOST_KINDS, FailureLog, StepRetry, task_failure, task_retry
from everbeat.runtime.task_scope import EXIT_SOFTWARE
from tests.runtime.programs.start import environment

KEY = error_to_json(error_from_exception(KeyError("k")))
TASK = UUID(int=7)


@pytest.fixture
def records() -> Iterator[list[logging.LogRecord]]:
    """Yield the records that are logged at the default level."""
    logger, handler, found = logging.getLogger("everbeat"), logging.Handler(), list[logging.LogRecord]()
    handler.emit = found.append  # type: ignore[method-assign]
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield found
    logger.removeHandler(handler)
    logger.setLevel(before)


def event_of(record: logging.LogRecord) -> Any:
    return record.everbeat_event  # type: ignore[attr-defined]


def test_a_task_failure_is_one_error_record_with_all_known_fields(
    records: list[logging.LogRecord],
) -> None:  # J4
    log = FailureLog()
    try:
        raise KeyError("k")
    except KeyError as error:
        log(task_failure(TASK, "welcome", attempt=3, error=KEY, exception=error))
    (record,) = records
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None
    assert record.exc_info[0] is KeyError
    text = record.getMessage()
    assert (
        text
        == f"task_failure task_id={TASK} name=welcome attempt=3 code=UNHANDLED_EXCEPTION type=KeyError message='k'"
    )


def test_a_task_failure_of_another_process_has_the_stored_traceback(
    records: list[logging.LogRecord],
) -> None:  # J4
    try:
        raise KeyError("k")
    except KeyError as error:
        stored = error_to_json(error_from_exception(error))
    FailureLog()(task_failure(TASK, "welcome", attempt=1, error=stored))
    (record,) = records
    assert record.exc_info is None
    assert "Traceback (most recent call last):" in record.getMessage()


def test_a_task_retry_is_logged_as_a_warning(records: list[logging.LogRecord]) -> None:  # J4
    FailureLog()(task_retry(TASK, "welcome", attempt=1, error=KEY, retry_in_s=10.0))
    (record,) = records
    assert record.levelno == logging.WARNING
    assert (
        "attempt=1 code=UNHANDLED_EXCEPTION type=KeyError message='k' retry_in_s=10.000"
        in record.getMessage()
    )


def test_failures_above_the_limit_are_folded_into_one_record_a_second(
    records: list[logging.LogRecord],
) -> None:  # J4
    log = FailureLog(every_s=3600)
    for number in range(300):
        log(task_failure(UUID(int=number), "welcome", attempt=1, error=KEY))
        log(task_retry(UUID(int=number), "goodbye", attempt=1, error=KEY, retry_in_s=1.0))
        log(WorkerStarted(worker_id="w", pid=number))  # other events are never folded
    assert len([each for each in records if each.levelno > logging.INFO]) == 50
    assert len([each for each in records if each.levelno == logging.INFO]) == 300
    log.flush()
    log.flush()
    first, second = records[-2:]
    assert (first.levelno, event_of(first).name, event_of(first).count) == (logging.ERROR, "welcome", 275)
    assert (second.levelno, event_of(second).name, event_of(second).count) == (
        logging.WARNING,
        "goodbye",
        275,
    )
    assert event_of(first).task_id == UUID(int=299)
    assert first.getMessage().startswith(
        "failures_folded name=welcome code=UNHANDLED_EXCEPTION type=KeyError count=275"
    )


def test_folded_failure_records_are_logged_from_any_thread_without_new_events(
    records: list[logging.LogRecord],
) -> None:  # J4
    told = threading.Event()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "folded" in record.getMessage():
                told.set()

    logger, handler = logging.getLogger("everbeat.worker"), Handler()
    logger.addHandler(handler)
    try:
        log = FailureLog(most=1, every_s=0.05)
        log(task_failure(TASK, "welcome", attempt=1, error=KEY))
        log(task_failure(TASK, "welcome", attempt=1, error=KEY))
        assert told.wait(30)
    finally:
        logger.removeHandler(handler)


def test_a_process_that_ends_waits_for_the_folded_records_of_its_timer_thread(
    records: list[logging.LogRecord],
) -> None:  # J4
    flushing, release, flushed = threading.Event(), threading.Event(), threading.Event()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "folded" in record.getMessage():
                flushing.set()
                assert release.wait(30)

    logger, handler = logging.getLogger("everbeat.worker"), Handler()
    logger.addHandler(handler)
    try:
        log = FailureLog(most=1, every_s=0.05)
        log(task_failure(TASK, "welcome", attempt=1, error=KEY))
        log(task_failure(TASK, "welcome", attempt=1, error=KEY))
        assert flushing.wait(30)
        ending = threading.Thread(target=lambda: (log.flush(), flushed.set()))
        ending.start()
        assert not flushed.wait(0.2), "the process would end while the record is not written"
        release.set()
        assert flushed.wait(30)
        ending.join()
    finally:
        logger.removeHandler(handler)
    assert [event_of(each).count for each in records if "folded" in each.getMessage()] == [1]


def test_invented_error_codes_cannot_exceed_the_limit_of_folded_kinds(
    records: list[logging.LogRecord],
) -> None:  # J4
    log = FailureLog(most=0, every_s=3600)
    for number in range(10 * MOST_KINDS):
        log(task_failure(TASK, "welcome", attempt=1, error=b'{"code": "C%d"}' % number))
    log.flush()
    assert len(records) == MOST_KINDS + 1
    assert event_of(records[-1]).name == "(others)"
    assert sum(event_of(each).count for each in records) == 10 * MOST_KINDS


def test_a_completed_task_is_not_logged_as_a_failure(records: list[logging.LogRecord]) -> None:  # J4
    FailureLog()(TaskFinished(task_id=TASK, name="welcome", state="COMPLETED", duration_s=0.1))
    assert records == []


def test_step_retries_count_towards_the_same_limit_and_are_folded(
    records: list[logging.LogRecord],
) -> None:  # J4
    log = FailureLog(most=1, every_s=3600)
    for number in range(3):
        log(
            StepRetry(
                task_id=UUID(int=number), name="order", attempt=1, code="BUSY", type="", message="m", step="charge",
                retry=1, max_retries=3, retry_in_s=1.0,
            )
        )  # fmt: skip
    log(task_retry(TASK, "goodbye", attempt=1, error=KEY, retry_in_s=1.0))
    log.flush()
    assert [record.levelno for record in records] == [logging.WARNING] * 3
    assert [(event_of(one).name, event_of(one).count) for one in records[1:]] == [
        ("order", 2),
        ("goodbye", 1),
    ]


LEAVING = """
import logging, sys, threading, time
from uuid import UUID
from everbeat.runtime.failure_log import LOG, MOST_A_SECOND, task_failure
from everbeat.runtime.main_loop import leave
from everbeat.runtime.task_scope import end_process

blocked = threading.Event()

class Blocks(logging.Handler):
    def emit(self, record):
        if record.getMessage().startswith(("failures_folded", "process_ended")):
            blocked.set()
            time.sleep(60)  # stands for a log server that does not answer

logging.getLogger("everbeat").addHandler(Blocks())
for number in range(MOST_A_SECOND + 1):
    LOG(task_failure(UUID(int=number), "welcome", attempt=1, error=b"{}"))
if sys.argv[1] == "another":
    threading.Thread(target=LOG.flush, daemon=True).start()
    assert blocked.wait(20)
if sys.argv[1] == "fatal":
    end_process("heart", ValueError("no luck"))
leave(7)
"""


@pytest.mark.parametrize(("whose", "code"), [("another", 7), ("own", 7), ("fatal", EXIT_SOFTWARE)])
def test_a_process_that_exits_does_not_wait_for_a_log_handler_that_blocks(whose: str, code: int) -> None:
    begun = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", LEAVING, whose], timeout=30, env=environment())
    assert ended.returncode == code
    assert time.monotonic() - begun < 10
