"""The handler of captured logs stays behind all handlers of the program, and does not capture in forked children."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextvars import copy_context
from io import StringIO

import pytest

from everbeat.domain.task.current import current_log
from everbeat.runtime.log_buffer import LogBuffer
from everbeat.runtime.log_capture import CaptureHandler, start_capturing, stop_capturing

log = logging.getLogger("shop.capture")


class Redacts(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = "removed", ()
        return True


@pytest.fixture
def buffer(monkeypatch: pytest.MonkeyPatch) -> Iterator[LogBuffer]:
    monkeypatch.setattr(logging.root, "handlers", [])
    made = LogBuffer(logging.INFO, lambda: None)
    token = current_log.set(made)
    start_capturing()
    yield made
    current_log.reset(token)
    stop_capturing()


def texts(buffer: LogBuffer) -> list[str]:
    return [line.message for part in buffer.unwritten() for line in part.lines]


def test_a_filter_of_a_handler_that_was_added_later_comes_before_the_capture(buffer: LogBuffer) -> None:
    handler = logging.StreamHandler(StringIO())
    handler.addFilter(Redacts())
    logging.root.addHandler(handler)
    start_capturing()  # as for each attempt
    log.error("card 4711")
    assert texts(buffer) == ["removed"]
    names = [type(each).__name__ for each in logging.root.handlers]
    assert (names[-1], names.count("CaptureHandler")) == ("CaptureHandler", 1)


@pytest.mark.timeout(60)
def test_code_that_logs_waits_for_no_other_thread_and_its_line_is_kept(buffer: LogBuffer) -> None:
    """A finalizer can log in the thread that holds the guard. It would wait for the lock of a handler, whose holder waits for the guard."""
    with buffer._guarded():
        thread = threading.Thread(target=copy_context().run, args=(log.error, "meanwhile"))
        thread.start()
        thread.join(30)
        assert not thread.is_alive()
        log.error("in the same thread")
    assert texts(buffer) == ["meanwhile", "in the same thread"]
    assert [line.number for part in buffer.unwritten() for line in part.lines] == [1, 2]


@pytest.mark.timeout(60)
def test_finalizers_that_log_block_no_thread(buffer: LogBuffer) -> None:
    is_ended = threading.Event()

    class Logs:
        def __del__(self) -> None:
            log.error("finalized")

    def work() -> None:
        for n in range(400):
            cycle: list[object] = [Logs()]
            cycle.append(cycle)
            log.error("line %d", n)

    def drain() -> None:
        while not is_ended.is_set():
            buffer.written(buffer.unwritten())
            gc.collect(0)

    logging.root.addHandler(logging.NullHandler())
    start_capturing()
    threads = [threading.Thread(target=copy_context().run, args=(work,), daemon=True) for _ in range(8)]
    drainer = threading.Thread(target=drain, daemon=True)
    for each in (*threads, drainer):
        each.start()
    for each in threads:
        each.join(30)
    is_ended.set()
    drainer.join(30)
    assert not any(each.is_alive() for each in (*threads, drainer))
    gc.collect()
    log.error("last")
    numbers = [line.number for part in buffer.unwritten() for line in part.lines]
    assert numbers == sorted(set(numbers))
    assert numbers[-1] > 8 * 400


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_can_log_while_another_thread_uses_the_log(buffer: LogBuffer) -> None:
    logging.root.addHandler(logging.NullHandler())
    is_locked, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with buffer._guarded():
            is_locked.set()
            may_end.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    try:
        assert is_locked.wait(30)
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(10)  # a child that hangs ends by this signal
            log.error("in the child")
            os._exit(any(isinstance(each, CaptureHandler) for each in logging.root.handlers))
        _, status = os.waitpid(child, 0)
    finally:
        may_end.set()
        holder.join()
    assert os.waitstatus_to_exitcode(status) == 0
    log.error("in the parent")
    assert texts(buffer) == ["in the parent"]
