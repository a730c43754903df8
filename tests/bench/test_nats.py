"""`everbeat bench --nats` measures notifications by PostgreSQL and by NATS, verifies each task, and leaves nothing behind."""

from __future__ import annotations

import asyncio

import pytest

from everbeat.cli.failures import ExitCode
from tests.bench.conftest import ONE_PAIR, bench_schemas, figures_of, run_bench
from tests.nats_server import NatsServer, find_program

pytestmark = pytest.mark.story


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_bench_measures_both_transports_in_one_run(database_url: str) -> None:
    find_program()
    with NatsServer() as server:
        words = (
            *ONE_PAIR,
            "--tasks",
            "400",
            "--json",
            "--not-durable",
            "--url",
            database_url,
            "--only",
            "nats",
        )
        done = run_bench("--nats", server.url, *words)
        assert asyncio.run(server.ask("STREAM.NAMES"))["total"] == 0
    figures = figures_of(done)
    print({name: one["value"] for name, one in figures.items()})
    for what in (
        "idle, send to code: p50",
        "idle, send to code: p99",
        "8 clients send",
        "8 sessions send inside the server",
        "drain, 1 worker process",
    ):
        by_postgres, by_nats = (
            figures[f"notified by PostgreSQL: {what}"],
            figures[f"notified by NATS: {what}"],
        )
        assert by_postgres["value"] > 0
        assert by_nats["beside"] == by_postgres["name"]
        assert by_nats["ratio"] == pytest.approx(by_nats["value"] / by_postgres["value"])
    assert bench_schemas(database_url) == []


def test_the_nats_part_of_a_bench_needs_a_server() -> None:
    done = run_bench("--only", "nats")
    assert done.returncode == ExitCode.USAGE
    assert "--nats nats://localhost:4222" in done.stderr


def test_a_bench_refuses_an_invalid_nats_url(database_url: str) -> None:
    done = run_bench("--nats", "http://somewhere", "--only", "nats", "--not-durable", "--url", database_url)
    assert done.returncode == ExitCode.USAGE, done.stderr
    assert "begins with nats:// or tls://" in done.stderr


def test_a_bench_reports_an_unreachable_nats_server_and_leaves_nothing_behind(database_url: str) -> None:
    words = ("--nats", "nats://127.0.0.1:1", "--tasks", "100", "--not-durable", "--url", database_url)
    done = run_bench(*words, "--only", "nats")
    assert done.returncode == ExitCode.FAILED
    assert "does not answer" in done.stderr
    assert bench_schemas(database_url) == []
