"""`everbeat bench` measures the real thing, verifies it, and leaves nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys

import psycopg
import pytest

pytestmark = pytest.mark.story


def test_the_figures_are_of_tasks_that_ran_once(database_url: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "everbeat", "bench", "--tasks", "300", "--json", "--url", database_url],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["tasks"], told["verified"]) == (300, True)
    figures = {one["name"]: one["value"] for one in told["figures"]}
    print(figures)
    assert len(figures) == 5
    assert all(value > 0 for value in figures.values())
    with psycopg.connect(database_url) as connection:
        left = connection.execute(
            "select nspname from pg_namespace where nspname like 'everbeat_bench_%'"
        ).fetchall()
    assert left == []


def test_too_few_tasks_are_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "everbeat", "bench", "--tasks", "1"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "tasks" in done.stderr
