"""`everbeat bench --nats` measures both ways of telling side by side, of tasks that ran once, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import psycopg
import pytest

from everbeat.cli.exit_codes import ExitCode
from tests.nats_server import NatsServer, find_program

pytestmark = pytest.mark.story


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "everbeat", "bench", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_both_ways_of_telling_are_measured_beside_each_other(database_url: str) -> None:
    find_program()
    with NatsServer() as server:
        words = ("--tasks", "400", "--json", "--not-durable", "--url", database_url, "--only", "nats")
        done = run("--nats", server.url, *words)
        assert asyncio.run(server.ask("STREAM.NAMES"))["total"] == 0
    assert done.returncode == 0, done.stderr
    figures = {one["name"]: one for one in json.loads(done.stdout)["figures"]}
    print({name: one["value"] for name, one in figures.items()})
    for what in (
        "idle, send to code: p50",
        "idle, send to code: p99",
        "8 clients send",
        "8 sessions send, no client between",
        "drain, 1 worker process",
    ):
        by_postgres, by_nats = figures[f"told by PostgreSQL: {what}"], figures[f"told by NATS: {what}"]
        assert by_postgres["value"] > 0
        assert by_nats["beside"] == by_postgres["name"]
        assert by_nats["ratio"] == pytest.approx(by_nats["value"] / by_postgres["value"])
    with psycopg.connect(database_url) as connection:
        left = connection.execute("select nspname from pg_namespace where nspname like 'everbeat_bench_%'")
        assert left.fetchall() == []


def test_the_part_is_not_measured_without_a_server() -> None:
    done = run("--only", "nats")
    assert done.returncode == ExitCode.USAGE
    assert "--nats nats://localhost:4222" in done.stderr


def test_what_is_no_nats_server_is_refused_before_anything_is_measured(database_url: str) -> None:
    done = run("--nats", "http://somewhere", "--only", "nats", "--not-durable", "--url", database_url)
    assert done.returncode == ExitCode.USAGE, done.stderr
    assert "begins with nats:// or tls://" in done.stderr


def test_a_server_that_does_not_answer_is_told_and_nothing_is_left(database_url: str) -> None:
    words = ("--nats", "nats://127.0.0.1:1", "--tasks", "100", "--not-durable", "--url", database_url)
    done = run(*words, "--only", "nats")
    assert done.returncode == ExitCode.FAILED
    assert "does not answer" in done.stderr
    with psycopg.connect(database_url) as connection:
        left = connection.execute("select nspname from pg_namespace where nspname like 'everbeat_bench_%'")
        assert left.fetchall() == []
