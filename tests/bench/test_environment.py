"""A bench removes the schemas of killed benches, and waits until the workers that it started can claim."""

from __future__ import annotations

import re
from contextlib import closing
from importlib import import_module

import pytest

from everbeat import App
from everbeat.bench.environment import Bench, lock_schema_name, remove_leftovers, workers
from everbeat.cli.own_tree import own_schema
from everbeat.store.target import Target
from tests.bench.conftest import bench_schemas


def test_only_unused_bench_schemas_are_removed(database_url: str, capsys: pytest.CaptureFixture[str]) -> None:
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
            lock_schema_name(other, Target(url=database_url, schema=living))
            lock_schema_name(connection, target)
            remove_leftovers(connection, target)
            assert sorted(bench_schemas(database_url)) == sorted([living, worked_in, ours, foreign])
            assert re.findall("everbeat_bench_\\w+", capsys.readouterr().err) == [left]
        finally:
            for name in [*names, foreign]:
                connection.execute(f"drop schema if exists {name} cascade")


def test_a_second_tree_is_ready_when_its_own_worker_can_claim(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = "everbeat_bench_deadbeef"
    monkeypatch.setenv("EVERBEAT_DATABASE_URL", database_url)
    monkeypatch.setenv("EVERBEAT_SCHEMA", schema)
    program = import_module("everbeat.bench.program")  # it reads these variables
    app = App(database_url, schema=schema, limits=program.LIMITS)
    target = Target(url=database_url, schema=schema)
    with closing(app), own_schema(app), target.connect("everbeat bench") as connection:
        bench = Bench(program=program._program("by_postgres", app), connection=connection)
        with workers(bench), workers(bench):
            assert len(app.list_active_workers()) == 2
