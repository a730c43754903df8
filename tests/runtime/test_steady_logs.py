"""Test that a logging handler that raises interrupts no caller: everbeat writes the record to stderr instead."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import everbeat
from everbeat.runtime.events import LOGGERS, EventBus, WorkerStarted, log_event


class Broken(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise OSError("the log server is\ngone")


@pytest.fixture(autouse=True)
def broken() -> Iterator[None]:
    handler = Broken()
    logging.root.addHandler(handler)
    yield
    logging.root.removeHandler(handler)


def test_an_event_is_written_to_stderr_if_the_logging_handler_raises(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:  # J4
    bus = EventBus()
    bus.subscribe(log_event)
    with caplog.at_level(logging.INFO, logger="everbeat.worker"):
        bus.emit(WorkerStarted(worker_id="w-1", pid=7))
    line = capsys.readouterr().err
    assert line.count("\n") == 2
    assert "worker_started worker_id=w-1 pid=7" in line
    assert "(a logging handler raised OSError: the log server is" in line


@pytest.mark.parametrize("name", LOGGERS)
def test_no_everbeat_logger_raises_an_error_of_its_handler(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:  # J4
    logging.getLogger(name).error("said %d", 1)
    assert "ERROR" in capsys.readouterr().err
    with pytest.raises(OSError, match="gone"):
        logging.getLogger("of.the.user").error("said")


def test_every_logger_name_in_the_source_is_listed() -> None:
    folder = Path(everbeat.__file__).parent
    named = set()
    for file in folder.rglob("*.py"):
        if file.relative_to(folder).parts[0] == "cli":
            continue
        for given in re.findall(r"getLogger\(([^)]*)\)", file.read_text()):
            if given == "__name__":
                named.add(".".join(("everbeat", *file.relative_to(folder).with_suffix("").parts)))
            elif given.startswith('"'):
                named.add(given.strip('"'))
    assert named <= set(LOGGERS)
    assert len(named) > 5
