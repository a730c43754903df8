"""Tracers that fail, carriers that do not fit, rows that were changed by hand, and apps without a tracer."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from psycopg import sql

from everbeat import App, Context, RetryPolicy
from everbeat.domain.recovery.hooks import HookSet
from everbeat.domain.tracing.carrier import CARRIER_BYTES, carrier_of, decode_carrier, encode_carrier
from everbeat.domain.tracing.model import TracedAttempt, TracedEnd, TracedRecovery, TracedSend, Tracer
from everbeat.domain.tracing.tracing import Tracing
from everbeat.errors import ConfigurationError, OpenTelemetryNotInstalled
from everbeat.recovering.hooks import LocalHooks
from everbeat.runtime.events import EventBus
from everbeat.runtime.tracing_log import log_tracer_failure
from everbeat.store.target import Target
from everbeat.tracing import Carrier
from tests.client.working import working
from tests.otel.conftest import Exported, NewApp


class Broken(Tracer):
    """Raises in every method, or when its context managers enter or exit."""

    def __init__(self, when: str) -> None:
        self.when = when

    @contextmanager
    def _around(self, *given: object) -> Iterator[Any]:
        if self.when == "enter":
            raise RuntimeError("no exporter")
        yield [{"traceparent": "x"}]
        raise RuntimeError("no exporter")

    def _called(self, *given: object) -> Any:
        if self.when == "call":
            raise RuntimeError("no exporter")
        return self._around(*given)

    sending = starting = running = step = committing = _called

    def step_recorded(self, name: str, /) -> None:
        raise RuntimeError("no exporter")

    def ids(self) -> tuple[str, str] | None:
        raise RuntimeError("no exporter")


@pytest.mark.parametrize("when", ["call", "enter", "exit"])
async def test_a_tracer_that_raises_breaks_no_send_and_no_task_and_is_logged_once(
    new_app: NewApp, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = new_app(tracing=Broken(when))

    def charge() -> int:
        logging.getLogger("shop").info("charging")
        return 7

    @app.task
    async def order(ctx: Context) -> int:
        return await ctx.astep(charge)

    @app.task
    def ship() -> None: ...

    await app.asend_many([ship.call(), ship.call()])
    async with working(app):
        assert await (await order.asend()).aresult(timeout=30) == 7
        await (await ship.asend()).aresult(timeout=30)
    failed = [record for record in caplog.records if "tracer_failed" in record.message]
    assert len([record for record in failed if "method=running" in record.message]) == 1
    assert len([record for record in failed if "method=sending" in record.message]) == 1
    assert all("Broken method=" in record.message and record.exc_info for record in failed)


class Exiting(Tracer):
    """Raises SystemExit around the code of attempts, or gives wrong ids."""

    def __init__(self, when: str) -> None:
        self.when = when

    @contextmanager
    def running(self, attempt: TracedAttempt, end: TracedEnd, /) -> Iterator[None]:
        if self.when == "enter":
            raise SystemExit(3)
        yield
        if self.when == "exit":
            raise SystemExit(3)

    def ids(self) -> tuple[str, str] | None:
        if self.when == "ids":
            raise SystemExit(3)
        return (7, object()) if self.when == "wrong ids" else None  # type: ignore[return-value]


@pytest.mark.parametrize("when", ["enter", "exit", "ids", "wrong ids"])
async def test_a_tracer_that_exits_or_gives_wrong_ids_leaves_no_task_without_an_end(
    new_app: NewApp, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An attempt whose end is lost would keep its lease as long as its worker lives."""
    app = new_app(tracing=Exiting(when))

    @app.task
    async def order() -> int:
        return 7

    @app.task
    def ship() -> int:
        return 8

    @app.task(retry=RetryPolicy(max_retries=1, intervals=["1s"], auto_retry_for=[LookupError]))
    async def charge(ctx: Context) -> int:
        if ctx.attempt == 1:
            raise LookupError
        return 9

    async with working(app):
        sent = [await order.asend(), await ship.asend(), await charge.asend()]
        assert [await each.aresult(timeout=30) for each in sent] == [7, 8, 9]
    failed = [record.message for record in caplog.records if "tracer_failed" in record.message]
    assert len(failed) == 1


async def test_a_tracer_that_hangs_delays_recovery_by_the_time_limit_of_hooks_only() -> None:
    released = threading.Event()
    calls: list[int] = []

    class Hanging(Tracer):
        def recovered(self, recoveries: Sequence[TracedRecovery], /) -> None:
            calls.append(len(recoveries))
            released.wait(30)

    tracing = Tracing([Hanging()], log_tracer_failure)
    hooks = LocalHooks(HookSet(tracing=tracing), timeout_s=0.1, events=EventBus())
    assert hooks.scopes.interrupted
    began_at = time.monotonic()
    await hooks.interrupted([])
    assert time.monotonic() - began_at < 20
    assert calls == [0]
    released.set()


class Noted(Tracer):
    """Gives its own carrier, and notes its calls."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log
        self.attempts: list[TracedAttempt] = []
        self.ends: list[TracedEnd] = []

    @contextmanager
    def sending(self, sends: Sequence[TracedSend], /) -> Iterator[Sequence[Carrier]]:
        self.log.append(f"{self.name} in")
        yield [{self.name: send.name, "shared": self.name} for send in sends]
        self.log.append(f"{self.name} out")

    @contextmanager
    def running(self, attempt: TracedAttempt, end: TracedEnd, /) -> Iterator[None]:
        self.attempts.append(attempt)
        yield
        self.ends.append(end)


async def test_several_tracers_share_one_carrier_and_see_each_attempt(new_app: NewApp) -> None:
    log: list[str] = []
    first, second = Noted("first", log), Noted("second", log)
    app = new_app(tracing=[first, second])

    @app.task(name="work")
    async def work() -> None:
        raise ValueError("no stock")

    async with working(app):
        handle = await work.asend()
        with pytest.raises(Exception, match="no stock"):
            await handle.aresult(timeout=30)
    assert log == ["first in", "second in", "second out", "first out"]
    (attempt,) = second.attempts
    assert first.attempts == [attempt]
    assert attempt.task_id == handle.id
    assert attempt.carrier == {"first": "work", "second": "work", "shared": "second"}
    (end,) = first.ends
    assert (end.how, end.type, end.message) == ("failed", "ValueError", "no stock")
    assert isinstance(end.exception, ValueError)


def test_a_carrier_that_does_not_fit_is_cut_and_loses_its_baggage_first() -> None:
    carrier = {
        "baggage": "b" * 5_000,
        "traceparent": "t" * 55,
        "tracestate": "s" * 5_000,
        "sentry-trace": "x",
    }
    found = encode_carrier(carrier)
    assert found is not None
    assert len(found) <= CARRIER_BYTES
    assert decode_carrier(found).keys() == {"traceparent", "tracestate", "sentry-trace"}
    assert encode_carrier({}) is None
    assert encode_carrier({"a": 1, "b": "nul \0", "c": "lone \ud800"}) is None  # type: ignore[dict-item]


BAD = ["null", "7", "[]", '"x"', '{"traceparent": 7}', '{"traceparent": "no"}', '{"a": "\\u0000"}', '{"a": "\\ud800"}', '{"traceparent": {"a": []}}',
       json.dumps({"baggage": "b" * 20_000}), "[" * 3_000 + "]" * 3_000]  # fmt: skip


@pytest.mark.parametrize("stored", BAD)
def test_a_bad_carrier_reads_as_an_empty_one(stored: str) -> None:
    found = decode_carrier(stored)
    assert all(isinstance(text, str) for text in found.values())
    assert "\0" not in "".join(found.values())


def test_a_carrier_that_is_not_an_object_is_empty() -> None:
    assert [carrier_of(value) for value in (None, 7, [], "x")] == [{}] * 4


async def test_rows_with_bad_carriers_run_like_all_others(
    new_app: NewApp, migrated: Target, exported: Exported, caplog: pytest.LogCaptureFixture
) -> None:
    app = new_app()

    @app.task
    async def work(n: int) -> int:
        return n

    handles = await app.asend_many(work.call(n) for n in range(len(BAD)))
    with migrated.connect("everbeat test") as connection:
        query = sql.SQL("update {}.tasks set context = %s::json where id = %s").format(
            sql.Identifier(migrated.schema)
        )
        for handle, text in zip(handles, BAD, strict=True):
            connection.execute(query, [text, handle.id])
    async with working(app):
        for n, handle in enumerate(handles):
            assert await handle.aresult(timeout=30) == n
    assert len(exported.named("process default")) == len(BAD)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("given", [7, "otel", [Broken], Broken])
def test_a_value_that_is_not_a_tracer_is_refused(given: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=r"App.tracing = .* must be a tracer or a sequence of tracers"
    ):
        App("postgresql:///", tracing=given)


def test_without_tracing_nothing_of_opentelemetry_is_loaded() -> None:
    code = (
        "import sys, everbeat, everbeat.tracing, everbeat.assembly.workers; from everbeat import App; App('postgresql:///');"
        "print([name for name in sys.modules if name.startswith(('opentelemetry', 'everbeat.otel'))])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_without_the_package_the_error_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['opentelemetry'] = None; import everbeat.tracing\n"
        "from everbeat.errors import OpenTelemetryNotInstalled\n"
        "try: everbeat.tracing.OpenTelemetry\n"
        "except OpenTelemetryNotInstalled as error: print(error)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'everbeat[otel]'" in found.stdout
    assert OpenTelemetryNotInstalled.code == "OPENTELEMETRY_NOT_INSTALLED"
