"""Test that a result above the app's limit ends its attempt in every mode, and that the worker continues."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from everbeat import App
from tests.cli.conftest import Command

LARGE = """
    from everbeat import App
    app = App(schema={schema!r}, payload_limit="1MB")

    @app.task
    async def in_loop(size: int) -> str:
        return "x" * size

    @app.task
    def in_thread(size: int) -> str:
        return "x" * size

    @app.task(run_in="process")
    def in_process(size: int) -> str:
        return "x" * size
"""


@pytest.fixture
def large_worker(everbeat: Command, schema: str) -> Iterator[None]:
    everbeat.write("large.py", LARGE.format(schema=schema))
    process = subprocess.Popen(
        everbeat.argv("worker", "large:app", "--grace", "10s"), cwd=everbeat.folder, env=everbeat.environment,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield
    finally:
        process.terminate()
        process.wait(timeout=30)


@pytest.mark.story
def test_a_result_above_the_limit_ends_only_its_own_attempt(
    large_worker: None, database_url: str, schema: str
) -> None:  # B13
    app = App(database_url, schema=schema)
    try:
        for name in ("in_loop", "in_thread", "in_process"):
            above = app.send_by_name(name, {"size": 1_048_575})  # two quotes make it one byte too many
            within = app.send_by_name(name, {"size": 1_048_574})
            error = above.outcome(timeout=60).error
            assert error.code == "RESULT_UNSERIALISABLE"
            assert "would take 1,048,577 bytes of JSON; App.payload_limit allows 1,048,576" in error.message
            assert len(within.result(timeout=60)) == 1_048_574
    finally:
        app.close()
