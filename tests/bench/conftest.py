"""Helpers that run `everbeat bench` as a program, and list the schemas that it leaves in the database."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from tests.cli.conftest import everbeat, forks

__all__ = ["everbeat", "forks"]

ONE_PAIR = ("--pairs", "1", "--allow-busy")
"""Options for a fast run on a busy machine, because these tests do not measure speed."""


def run_bench(*words: str, timeout_s: float = 280) -> subprocess.CompletedProcess[str]:
    """Run `everbeat bench`, wait until it exits, and return the completed process."""
    command = [sys.executable, "-m", "everbeat", "bench", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)


def figures_of(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    """Return the figures of a successful run, by name."""
    assert done.returncode == 0, done.stderr
    return {figure["name"]: figure for figure in json.loads(done.stdout)["figures"]}


def bench_schemas(database_url: str) -> list[str]:
    """Return the names of all bench schemas in the database."""
    with psycopg.connect(database_url) as connection:
        rows = connection.execute("select nspname from pg_namespace where nspname like 'everbeat_bench_%'")
        return [row[0] for row in rows.fetchall()]


@pytest.fixture
def leaves_no_schema(database_url: str) -> Iterator[None]:
    """Assert after the test that no bench schema is left in the database."""
    yield
    assert bench_schemas(database_url) == []
