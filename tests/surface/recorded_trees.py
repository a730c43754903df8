"""Run real programs whose statements are recorded: a server that logs, worker trees, and an app that sends to them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from types import ModuleType
from typing import Any
from unittest.mock import patch

import psutil

from everbeat.embedded.server import EmbeddedServer
from tests.conftest import FAST_SETTINGS
from tests.surface.statement_log import SETTINGS, Sent, StatementLog

PROGRAM = Path(__file__).parent / "programs" / "recorded_program.py"
PATIENCE_S = 60.0


class Trees:
    """One schema of a server that logs, with the program that sends tasks and the worker trees that run them."""

    def __init__(
        self, log: StatementLog, url: str, schema: str, folder: Path, recovery: dict[str, Any]
    ) -> None:
        self.schema = schema
        self._log = log
        self._folder = folder
        self._environment = {
            "RECORDED_URL": url, "RECORDED_SCHEMA": schema, "RECORDED_RECOVERY": json.dumps(recovery),
            "PYTHONPATH": str(PROGRAM.parent),
        }  # fmt: skip
        self.program = self._imported()
        self.app = self.program.app
        self.app.migrate()
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, *settings: dict[str, Any]) -> list[subprocess.Popen[bytes]]:
        """Start a tree of one worker process with each of these settings; return once all workers claim."""
        known = len(self.app.list_workers())
        started = [self._spawned({"processes": 1} | each) for each in settings]
        self.until(lambda: len(self.app.list_workers()) == known + len(settings), "workers")
        return started

    def _spawned(self, settings: dict[str, Any]) -> subprocess.Popen[bytes]:
        with (self._folder / f"{self.schema}-{len(self._processes)}.log").open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "everbeat", "worker", f"{PROGRAM.stem}:app"],
                env=os.environ | self._environment | {"RECORDED_WORKER": json.dumps(settings)},
                cwd=self._folder, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self._processes.append(process)
        return process

    @staticmethod
    def kill(process: subprocess.Popen[bytes]) -> None:
        """End all processes of a tree at once, the supervisor first."""
        doomed = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for each in doomed:
            each.suspend()
        for each in doomed:
            each.kill()
        process.wait(timeout=PATIENCE_S)

    @contextmanager
    def watched(self) -> Iterator[list[Sent]]:
        """Yield a list that has the statements of the block after its end."""
        sent: list[Sent] = []
        first = self._log.mark()
        yield sent
        sent += self._log.between(first, self._log.mark(), schema=self.schema)

    def until(self, truth: Callable[[], object], what: str) -> None:
        """Wait until it is true."""
        give_up_at = monotonic() + PATIENCE_S
        while not truth():
            if monotonic() > give_up_at:
                logs = "\n".join(
                    path.read_text("utf-8") for path in self._folder.glob(f"{self.schema}-*.log")
                )
                raise AssertionError(f"{what}: not within {PATIENCE_S} s\n{logs[-6000:]}")
            sleep(0.02)  # other processes make it true

    def close(self) -> None:
        """Kill all trees that still run."""
        for process in self._processes:
            if process.poll() is None:
                self.kill(process)
        self.app.close()

    def _imported(self) -> ModuleType:
        """Return the program, imported again for this schema."""
        with patch.dict(os.environ, self._environment | {"RECORDED_WORKER": "{}"}):
            spec = importlib.util.spec_from_file_location(PROGRAM.stem, PROGRAM)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[PROGRAM.stem] = module  # registration looks up annotations of functions there
            try:
                spec.loader.exec_module(module)
            finally:
                del sys.modules[PROGRAM.stem]
        return module


@contextmanager
def logging_server() -> Iterator[Callable[..., Trees]]:
    """Yield a function that makes schemas on a server that logs its statements."""
    made: list[Trees] = []
    with (
        tempfile.TemporaryDirectory(prefix="eb-", ignore_cleanup_errors=True) as folder,
        EmbeddedServer.open(Path(folder), settings=FAST_SETTINGS | SETTINGS) as server,
    ):
        log = StatementLog(Path(folder), server.url)

        def trees(schema: str, **recovery: Any) -> Trees:
            made.append(Trees(log, server.url, schema, Path(folder), recovery))
            return made[-1]

        try:
            yield trees
        finally:
            for each in made:
                each.close()
