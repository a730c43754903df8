from __future__ import annotations

import logging
import threading
from uuid import UUID

import pytest

from everbeat.errors import DatabaseUnreachable
from everbeat.runtime.events import (
    Event,
    EventBus,
    LeasesLost,
    LoopBlocked,
    ServiceFailed,
    TaskRecovered,
    WorkerExited,
    WorkerStarted,
    event_name,
    event_text,
    log_event,
)

STARTED = WorkerStarted(worker_id="web-1-abcdef01", pid=1)
TASK = UUID("01890a5d-ac96-774b-bcce-b302099a8057")


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_every_subscriber_gets_every_event_until_it_unsubscribes() -> None:
    bus, first, second = EventBus(), list[Event](), list[Event]()
    leave = bus.subscribe(first.append)
    bus.subscribe(second.append)
    bus.emit(STARTED)
    leave()
    leave()
    bus.emit(STARTED)
    assert (len(first), len(second)) == (1, 2)


def test_a_failing_subscriber_affects_neither_the_emitter_nor_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bus, heard = EventBus(), list[Event]()

    def broken(event: Event) -> None:
        raise ValueError("cannot listen")

    bus.subscribe(broken)
    bus.subscribe(heard.append)
    bus.emit(STARTED)
    assert heard == [STARTED]
    assert "subscriber_failed event=worker_started" in caplog.text


def test_the_event_bus_can_be_used_from_many_threads() -> None:
    bus, heard = EventBus(), list[Event]()
    bus.subscribe(heard.append)

    def emit() -> None:
        for _ in range(500):
            bus.subscribe(lambda event: None)()
            bus.emit(STARTED)

    threads = [threading.Thread(target=emit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(heard) == 2000


def test_a_logged_event_has_its_logger_level_text_and_the_event_object(
    caplog: pytest.LogCaptureFixture,
) -> None:
    event = WorkerExited(worker_id="web-1-abcdef01", pid=7, cause="killed by SIGKILL")
    with caplog.at_level(logging.DEBUG, logger="everbeat"):
        log_event(event)
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("everbeat.supervisor", logging.WARNING)
    assert record.getMessage() == (
        'worker_exited worker_id=web-1-abcdef01 pid=7 cause="killed by SIGKILL" in_order=False'
    )
    assert record.__dict__["everbeat_event"] is event


def test_a_repeated_service_failure_is_logged_ever_more_rarely(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="everbeat"):
        for consecutive in range(1, 101):
            log_event(
                ServiceFailed(name="reaper", error=OSError("gone"), consecutive=consecutive, retry_in_s=0.5)
            )
        log_event(WorkerExited(worker_id="web-1-abcdef01", pid=7, cause="exit code 0", in_order=True))
    *failures, farewell = caplog.records
    told = [record.__dict__["everbeat_event"].consecutive for record in failures]
    assert told == [1, 2, 4, 8, 16, 32, 64]
    assert {record.levelno for record in failures} == {logging.ERROR}
    assert farewell.levelno == logging.INFO


def test_a_service_that_fails_in_a_database_outage_is_logged_as_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="everbeat"):
        for consecutive in range(1, 20):
            outage = DatabaseUnreachable("gone")
            log_event(ServiceFailed(name="reaper", error=outage, consecutive=consecutive, retry_in_s=0.5))
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_event_text_is_one_line_of_parseable_values() -> None:
    recovered = TaskRecovered(
        task_id=TASK,
        name="welcome",
        from_state="RUNNING",
        action="retry",
        cause='said "no"\nand left',
        noticed_by="session",
        noticed_after_s=1.23456,
    )
    text = event_text(recovered)
    assert f"task_recovered task_id={TASK} name=welcome from_state=RUNNING action=retry" in text
    assert "noticed_after_s=1.235" in text
    many = event_text(LeasesLost(task_ids=(TASK,) * 500, reason="worker gone"))
    assert "(+480)" in many
    assert len(many) < 1500


def test_event_text_puts_a_stack_below_its_line_and_survives_unprintable_errors() -> None:
    blocked = LoopBlocked(names=("report",), seconds=2.0, interpreter_held=False, stack="one\n  two\n")
    assert event_text(blocked) == (
        "loop_blocked names=report seconds=2.000 interpreter_held=False\nstack:\n  one\n    two"
    )
    failed = ServiceFailed(name="reaper", error=Unprintable(), consecutive=1, retry_in_s=0.5)
    assert 'error="Unprintable: (its text cannot be made)"' in event_text(failed)
    huge = ServiceFailed(name="reaper", error=ValueError("x" * 10_000_000), consecutive=1, retry_in_s=0.5)
    assert len(event_text(huge)) < 3000


def test_event_names_are_class_names_in_snake_case() -> None:
    assert event_name(STARTED) == "worker_started"
