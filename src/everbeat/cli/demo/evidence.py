"""What the demo knows at its end: what the database stores about every file, every blow, every recovery, and a count
that no queue had a part in.

What lives here: these facts and how they are gathered. What may not: the judgement.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Final
from uuid import UUID

from everbeat import App, RecoveryInfo, TaskState
from everbeat.cli.demo import count
from everbeat.cli.demo.count import Counts, total
from everbeat.cli.demo.plan import Act

_MINUTE_S: Final = 58.0
_PATIENCE_S: Final = 14.0  # the workers went first; now that they have left, it may finish


@dataclass(slots=True, kw_only=True)
class Strike:
    """One blow that fell. `held`: the tasks in the victim's name while it was stopped; times are the database's."""

    act: Act
    tree: int
    pid: int
    worker_ids: frozenset[str]
    at: datetime
    at_s: float
    held: frozenset[UUID]
    thawed_after_s: float | None = None
    refused: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedFile:
    """What the database stores about the task of one file; `attempts` are (fence, outcome) of those that ended."""

    task_id: UUID
    path: str
    task: str
    state: TaskState
    counts: Counts | None
    attempts: tuple[tuple[int, str], ...]

    @property
    def completed(self) -> int:
        """How many attempts counted."""
        return sum(outcome == "COMPLETED" for _, outcome in self.attempts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """What NATS counted. `delivered_after`: since its server came back; `left`: still in the stream at the end; `ended_meanwhile`: tasks
    that ended in the `away_s` seconds for which it was away."""

    published: int
    delivered: int
    delivered_after: int
    left: int
    away_s: float
    ended_meanwhile: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything the verdict is made of; `paths` are the files sent, of `found`.

    `independent` is None, and `problems` not empty, if something went wrong. `messages`: None where PostgreSQL told the tasks.
    """

    folder: Path
    found: int
    paths: tuple[str, ...]
    files: Sequence[CountedFile]
    strikes: Sequence[Strike]
    recoveries: Sequence[RecoveryInfo]
    independent: Counts | None
    took_s: float
    problems: Sequence[str] = field(default=())
    messages: Messages | None = None


def counted_files(app: App, sent: Iterable[tuple[UUID, str]]) -> list[CountedFile]:
    """What the database stores about these tasks."""
    found = []
    for task_id, path in sent:
        info = app.info(task_id)
        found.append(
            CountedFile(
                task_id=task_id,
                path=path,
                task=info.name,
                state=info.state,
                counts=Counts(**info.result) if info.state is TaskState.COMPLETED else None,
                attempts=tuple((attempt.fence, attempt.outcome) for attempt in info.attempts),
            )
        )
    return found


class IndependentCount:
    """One plain process that counts the same files, beside the workers and with their leave; it imports no everbeat."""

    def __init__(self, paths: Iterable[str], *, folder: Path) -> None:
        (folder / "paths").write_bytes(b"\0".join(os.fsencode(path) for path in paths))
        self._output = folder / "independent.json"
        with (folder / "paths").open("rb") as given, self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-I", count.__file__], stdin=given, stdout=output, stderr=subprocess.DEVNULL
            )

    def result(self, paths: Iterable[str], *, after_s: float) -> Counts | None:
        """The sums over these files, which were among those given; None where it failed. It may take the rest of a minute, of which
        `after_s` seconds are over."""
        try:
            if self._process.wait(timeout=max(_PATIENCE_S, _MINUTE_S - after_s)) != 0:
                return None
            by_path = json.loads(self._output.read_text(encoding="utf-8"))
            return total(Counts(**by_path[path]) for path in paths)
        except (subprocess.TimeoutExpired, ValueError, LookupError, TypeError):
            return None
        finally:
            self.end()

    def end(self) -> None:
        """Ends it, done or not."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
