"""However `everbeat bench` ends, nothing of it goes on; and what one that was killed left behind, the next one removes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psycopg
import pytest

from everbeat.cli.bench.leftovers import remove_leftovers, reserve
from everbeat.store.target import Target
from tests.cli.conftest import Command
from tests.cli.outside import processes_of, until

STARTING_S = 60.0
ENDING_S = 15.0


def schemas(url: str) -> list[str]:
    with psycopg.connect(url) as connection:
        rows = connection.execute("select nspname from pg_namespace where nspname like 'everbeat_bench_%'")
        return [row[0] for row in rows.fetchall()]


@contextmanager
def benching(everbeat: Command, database_url: str, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A bench in a process group of its own, as a terminal gives it; its trees are at work."""
    log = everbeat.folder / "bench.log"
    with log.open("wb") as output:
        bench = subprocess.Popen(
            everbeat.argv("bench", "--tasks", "300", "--not-durable", "--url", database_url, *words),
            cwd=everbeat.folder,
            env=everbeat.environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            process_group=0,
        )
    try:
        until(lambda: len(processes_of(everbeat.folder)) >= 3, within_s=STARTING_S)
        yield bench
    finally:
        bench.kill()
        bench.wait()
        print(log.read_text())
        for left in processes_of(everbeat.folder):
            left.kill()


def recovered(everbeat: Command) -> bool:
    return "task_recovered" in (everbeat.folder / "bench.log").read_text()


PARTS = ("drain", "idle", "deaths")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.mark.story
@pytest.mark.parametrize(
    ("part", "number"),
    [
        pytest.param(
            part, number, marks=() if PARTS.index(part) == SIGNALS.index(number) else pytest.mark.long
        )
        for part in PARTS
        for number in SIGNALS
    ],
)
def test_an_interrupted_bench_leaves_nothing_behind(
    everbeat: Command, database_url: str, part: str, number: signal.Signals
) -> None:
    with benching(everbeat, database_url, "--only", part, "--watch", "60") as bench:
        if part == "deaths":
            until(lambda: recovered(everbeat), within_s=STARTING_S)  # a tree runs a task of ten minutes
        os.killpg(bench.pid, number)  # as a terminal does; its trees are in sessions of their own
        assert bench.wait(timeout=ENDING_S) == 130
        assert "Interrupted; workers ended" in (everbeat.folder / "bench.log").read_text()
        assert schemas(database_url) == []
        until(lambda: processes_of(everbeat.folder) == [], within_s=2.0)


@pytest.mark.long
@pytest.mark.story
def test_a_second_signal_does_not_keep_it_from_clearing_away(everbeat: Command, database_url: str) -> None:
    with benching(everbeat, database_url, "--only", "idle", "--watch", "60") as bench:
        for _ in range(1_000):
            bench.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                bench.wait(timeout=0.02)
                break
        assert bench.returncode == 130
        assert schemas(database_url) == []
        until(lambda: processes_of(everbeat.folder) == [], within_s=2.0)


@pytest.mark.long
@pytest.mark.story
def test_the_trees_of_a_bench_that_is_killed_end_and_the_next_one_removes_its_schema(
    everbeat: Command, database_url: str
) -> None:
    with benching(everbeat, database_url, "--only", "deaths") as bench:
        bench.kill()
        until(lambda: processes_of(everbeat.folder) == [], within_s=2.0)
    (left,) = schemas(database_url)
    done = everbeat("bench", "--tasks", "100", "--only", "plain", "--not-durable", "--url", database_url)
    assert f"removed: {left}" in done.assert_code(0).err
    assert schemas(database_url) == []


def test_only_what_nobody_uses_is_removed(database_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"everbeat_bench_{number:08x}" for number in range(4)]
    living, worked_in, left, ours = names
    foreign = "everbeat_bench_of_the_users"
    target = Target(url=database_url, schema=ours)
    with target.connect("test") as connection, target.connect("another bench") as other:
        try:
            for name in [*names, foreign]:
                connection.execute(f"create schema {name}")
            connection.execute(f"create table {worked_in}.supervisors as select {1 << 40 | 7} as lock_key")
            other.execute(f"select pg_advisory_lock({1 << 40 | 7})")
            reserve(other, Target(url=database_url, schema=living))
            reserve(connection, target)
            remove_leftovers(connection, target)
            assert sorted(schemas(database_url)) == sorted([living, worked_in, ours, foreign])
            assert re.findall("everbeat_bench_\\w+", capsys.readouterr().err) == [left]
        finally:
            for name in [*names, foreign]:
                connection.execute(f"drop schema if exists {name} cascade")
