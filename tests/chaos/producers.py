"""The producer processes, which are started together and stopped by closing their standard input."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.chaos.plan import Plan

ROOT: Final = Path(__file__).parents[2]

_NUMBERS_EACH: Final = 10_000_000
_GRACE_S: Final = 20.0


class Producers:
    """The number of producers that the plan requires, each with a separate log, number range and random generator."""

    def __init__(self, plan: Plan, folder: Path, *, environment: Mapping[str, str]) -> None:
        self._plan = plan
        self._folder = folder
        self._environment = dict(environment)
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, *, url: str) -> None:
        """Start all producers with the same database URL."""
        for number in range(self._plan.producers):
            log = self._folder / f"producer-{number}.jsonl"
            seed = self._plan.seed * 1_000 + number
            rate = self._plan.sends_per_s / self._plan.producers
            arguments = [str(log), str(seed), str(rate), str((number + 1) * _NUMBERS_EACH)]
            with (self._folder / f"producer-{number}.log").open("wb") as output:
                process = subprocess.Popen(
                    [sys.executable, "-m", "tests.chaos.producer", *arguments],
                    env=self._environment | {"CHAOS_URL": url},
                    cwd=ROOT,
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            self._processes.append(process)

    def stop(self) -> None:
        """Stop the producers after their current sends."""
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(timeout=_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
