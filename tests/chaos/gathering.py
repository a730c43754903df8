"""Read the evidence of a run, first from files outside the database, and then from its tables."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Final, TypeVar

from psycopg import Connection, sql
from psycopg.rows import kwargs_row

from tests.chaos.around_oracles import problems
from tests.chaos.clock import boot_s
from tests.chaos.cluster import APPLICATION, SESSIONS
from tests.chaos.director import SCHEMA, Director
from tests.chaos.evidence import (
    AttemptRow,
    Effect,
    EndRow,
    Evidence,
    InjectedFault,
    RecoveryRow,
    Refusal,
    Sends,
    TaskRow,
    Timeline,
    WorkflowRow,
)
from tests.chaos.plan import Kind, Plan
from tests.invariants import breaches, has_moved, of_both
from tests.tick_coverage import coverage

T = TypeVar("T")

_REFUSAL: Final = re.compile(
    r"^(\d+-\d+-\d+ \d+:\d+:\d+,\d+) \d+ .* (leases_lost task_ids|zombie_refused task_id)=\"?([0-9a-f,-]+)"
)
_RECOVERIES: Final = """
    select r.task_id::text, r.name, r.claim_id::text, r.was, r.noticed_by, r.noticed_after_ms, r.action, r.cause,
        r.pid as victim, s.pid as supervisor, r.supervisor_id, o.pid as observer, w.at
    from {schema}.recoveries r
    join {schema}.witness w on w.what = 'recovery' and w.subject = r.id::text
    left join {schema}.supervisors s on s.id = r.supervisor_id
    left join {schema}.supervisors o on o.id = r.recovered_by
    order by w.at
"""
_ENDS: Final = """
    select s.id as supervisor_id, s.pid as supervisor, s.ended_how as how, w.at from {schema}.supervisors s
    join {schema}.witness w on w.what = 'end' and w.subject = s.id
    order by w.at
"""


def gather(director: Director, plan: Plan, timeline: Timeline, folder: Path) -> Evidence:
    """Return the evidence of a run. Call this function after all processes have exited."""
    server_log = director.cluster.log
    (folder / "server.log").write_text(server_log)
    with director.cluster.connection() as connection:
        tables = _Tables(connection)
        return Evidence(
            plan=plan,
            timeline=timeline,
            lives=[life for tree in director.trees for life in tree.lives],
            effects=[Effect(**line) for line in _lines(folder / "effects.jsonl")],
            sends=_sends(folder),
            faults=_faults(folder),
            refusals=[refusal for tree in range(plan.trees) for refusal in _refusals(folder, tree)],
            tasks=tables.read(
                TaskRow,
                "select id::text, name, (args ->> 'number')::bigint as number, state, attempt, serial from {schema}.tasks",
            ),
            workflows=tables.read(WorkflowRow, "select id::text, state from {schema}.workflows"),
            attempts=tables.read(
                AttemptRow,
                "select task_id::text, attempt, claim_id::text, fence, outcome, will_retry from {schema}.attempts a",
            ),
            recoveries=tables.read(RecoveryRow, _RECOVERIES),
            ends=tables.read(EndRow, _ENDS),
            beats=tables.beats(),
            ledger=tables.read(
                lambda task, claim: (task, claim),
                "select task_id::text as task, claim_id::text as claim from {schema}.ledger",
            ),
            breaches=[
                *((one.number, f"{one.rule}: {one.rows}") for one in breaches(connection, SCHEMA)),
                *_tick_problems(connection),
                *problems(connection, SCHEMA),
            ],
            sessions=[row[0] for row in connection.execute(SESSIONS, [APPLICATION]).fetchall()],
            logs="".join(_log(folder, tree) for tree in range(plan.trees)),
            server_log=server_log,
            moved=tables.moved(),
        )


def _tick_problems(connection: Connection[Any]) -> Iterator[tuple[str, str]]:
    found = coverage(connection, SCHEMA)
    for problem in found.problems:
        yield "I32", problem
    if not found.figures["SENT"]:
        yield "I31", "no tick of a schedule was sent, so the run shows nothing about ticks"


class _Tables:
    def __init__(self, connection: Connection[Any]) -> None:
        self._connection = connection
        self._has_moved = has_moved(connection, SCHEMA)

    def read(self, make: Callable[..., T], query: str) -> list[T]:
        with self._connection.cursor(row_factory=kwargs_row(make)) as cursor:
            both = of_both(query) if self._has_moved else query
            text = sql.SQL(both).format(schema=sql.Identifier(SCHEMA))
            return cursor.execute(text).fetchall()

    def moved(self) -> int:
        if not self._has_moved:
            return 0
        return len(self.read(lambda name: name, "select name from {schema}.history"))

    def beats(self) -> dict[str, list[float]]:
        found = defaultdict[str, list[float]](list)
        query = "select subject, at from {schema}.witness where what = 'beat' order by at"
        for supervisor_id, at in self.read(lambda subject, at: (subject, at), query):
            found[supervisor_id].append(at)
        return dict(found)


def _sends(folder: Path) -> Sends:
    intended: dict[int, str] = {}
    acknowledged: dict[int, str] = {}
    cancels: dict[str, tuple[str, float]] = {}
    started: dict[str, list[int]] = {}
    for path in folder.glob("producer-*.jsonl"):
        for line in _lines(path):
            if "intends" in line:
                intended |= dict(zip(line["intends"], line["names"], strict=True))
            if "sent" in line:
                acknowledged |= dict(zip(line["sent"], line["ids"], strict=True))
            if "started" in line:
                started[line["started"]] = line["numbers"]
            if "cancelled" in line:
                cancels[line["cancelled"]] = (line["verdict"], line["at"])
    return Sends(intended=intended, acknowledged=acknowledged, cancels=cancels, started=started)


def _faults(folder: Path) -> list[InjectedFault]:
    began: dict[int, dict[str, Any]] = {}
    done: list[InjectedFault] = []
    for line in _lines(folder / "faults.jsonl"):
        match line["what"]:
            case "began":
                began[line["number"]] = line
            case "ended":
                done.append(_struck(began.pop(line["number"]), ended=line))
            case _:
                pass
    done += [_struck(line, ended=None) for line in began.values()]
    return sorted(done, key=lambda fault: fault.began)


def _struck(line: dict[str, Any], *, ended: dict[str, Any] | None) -> InjectedFault:
    known = {"number", "kind", "tree", "what", "at"}
    return InjectedFault(
        number=line["number"],
        kind=Kind(line["kind"]),
        tree=line["tree"],
        began=line["at"],
        ended=None if ended is None else ended["at"],
        detail={name: value for name, value in (ended or line).items() if name not in known},
    )


def _refusals(folder: Path, tree: int) -> Iterator[Refusal]:
    offset = datetime.now().astimezone().timestamp() - boot_s()
    for line in _log(folder, tree).splitlines():
        if match := _REFUSAL.match(line):
            at = datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S,%f").astimezone().timestamp() - offset
            by_word = match[2].startswith("leases_lost")
            for task in match[3].split(","):
                if task:
                    yield Refusal(tree=tree, task=task, by_word=by_word, at=at)


def _log(folder: Path, tree: int) -> str:
    path = folder / f"tree-{tree}.log"
    return path.read_text(errors="replace") if path.exists() else ""


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        with path.open(encoding="utf-8") as file:
            for line in file:
                yield json.loads(line)
