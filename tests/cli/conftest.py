"""Fixtures that run the real command in a separate folder, with the shared PostgreSQL server and the test's schema."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from everbeat.cli.main import COMMANDS
from tests.cli.forks import Forks

SHOP = """
    import asyncio
    import time
    from everbeat import App, Context, TaskError

    print("importing shop")
    app = App()

    @app.task
    async def welcome(user_id: int, locale: str = "en") -> str:
        return f"{user_id} {locale}"

    @app.task
    async def refuse(reason: str) -> None:
        raise TaskError("REFUSED", reason, {"reason": reason})

    @app.task
    def slow(seconds: float) -> str:
        time.sleep(seconds)  # the test needs a task that runs for a while
        return "done"

    @app.task
    def step(ctx: Context) -> None:
        ctx.progress("packing", 0.5, "half way")
        time.sleep(0.5)  # the progress must be seen while it runs
"""


SHORT_LIVED = frozenset(COMMANDS) - {"worker", "demo", "bench", "db"}
"""The commands that print a result and exit. The other commands start processes and run for a while."""
_OF_PYTHON = re.compile("PYTHON|LC_|LANG")


@dataclass(frozen=True, slots=True)
class Answer:
    """The exit code and output of a finished command."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """Return the single JSON document on stdout."""
        return json.loads(self.out)

    @property
    def error(self) -> Any:
        """Return the error in the single JSON document on stderr."""
        return json.loads(self.err)["error"]

    def assert_code(self, expected: int) -> Answer:
        """Assert that the command exited with the expected code and without a traceback. Return this object."""
        assert self.code == expected, f"exit code {self.code}\nstdout:\n{self.out}\nstderr:\n{self.err}"
        assert "site-packages" not in self.err
        return self


@dataclass(frozen=True, slots=True)
class Command:
    """Runs `everbeat` in a given folder, with given environment variables."""

    folder: Path
    environment: dict[str, str]
    forks: Forks

    def __call__(self, *arguments: str, timeout_s: float = 60, **environment: str | None) -> Answer:
        """Run the command until it exits. Environment variables that are None are unset."""
        if arguments and arguments[0] in SHORT_LIVED and not any(map(_OF_PYTHON.match, environment)):
            changed = self._with(environment)
            return Answer(
                *self.forks.run(arguments, folder=self.folder, environment=changed, timeout_s=timeout_s)
            )
        finished = subprocess.run(
            self.argv(*arguments),
            cwd=self.folder,
            env=self._with(environment),
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=timeout_s,
        )
        return Answer(finished.returncode, finished.stdout, finished.stderr)

    def argv(self, *arguments: str) -> list[str]:
        """Return the command line that runs `everbeat` with these arguments."""
        return [sys.executable, "-m", "everbeat", *arguments]

    def write(self, name: str, code: str) -> Path:
        """Write a Python module to the folder, and return its path."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(code), encoding="utf-8")
        return path

    def _with(self, changes: dict[str, str | None]) -> dict[str, str]:
        merged: dict[str, str | None] = {**self.environment, **changes}
        return {name: value for name, value in merged.items() if value is not None}


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Yield the server from which short commands are forked."""
    made = Forks()
    yield made
    made.close()


@pytest.fixture
def everbeat(tmp_path: Path, database_url: str, schema: str, forks: Forks) -> Command:
    """Return the command, with the test's database in its environment and `shop.py` in its folder."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not re.match(r"EVERBEAT_|NO_COLOR|COLUMNS|_TYPER", name)
    }
    command = Command(
        tmp_path,
        kept | {"EVERBEAT_DATABASE_URL": database_url, "EVERBEAT_SCHEMA": schema, "PYTHONUNBUFFERED": "1"},
        forks,
    )
    command.write("shop.py", SHOP.replace("App()", f"App(schema={schema!r})"))
    return command


@dataclass(frozen=True, slots=True)
class RunningWorker:
    """A running `everbeat worker` that writes its log to a file."""

    process: subprocess.Popen[bytes]
    log: Path


@pytest.fixture
def shop_worker(everbeat: Command) -> Iterator[RunningWorker]:
    """Yield a running `everbeat worker shop:app` with one worker process."""
    log = everbeat.folder / "worker.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            everbeat.argv("worker", "shop:app", "--processes", "1", "--grace", "10s"),
            cwd=everbeat.folder,
            env=everbeat.environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
    try:
        yield RunningWorker(process, log)
    finally:
        process.kill()
        process.wait(timeout=10)
        print(log.read_text(errors="replace"))  # pytest shows it if the test failed
