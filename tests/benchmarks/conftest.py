"""Helpers that run `python -m benchmarks` as a program, and check which schemas and databases it leaves on the server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

ROOT = Path(__file__).parents[2]
ONE_PAIR = ("--pairs", "1", "--allow-busy", "--not-durable")
"""Options for a fast run on a busy machine, because these tests do not measure speed."""


def compare(
    *words: str, timeout_s: float = 280, cwd: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `python -m benchmarks`, wait until it exits, and return the completed process."""
    command = [sys.executable, "-P", "-m", "benchmarks", *words]
    variables = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=timeout_s, cwd=cwd)


@pytest.fixture
def leaves_nothing(database_url: str) -> Iterator[None]:
    """Assert after the test that no schema or database of a comparison is left on the server."""
    yield
    with psycopg.connect(database_url) as connection:
        left = connection.execute(
            "select nspname from pg_namespace where nspname like 'everbeat_bench_%'"
            " union all select datname from pg_database where datname like 'everbeat_bench_%'"
        )
        assert left.fetchall() == []
