"""The scenario of a story: a schema, trees of real processes, a file of effects, and helpers that kill, freeze and observe."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import UUID

import psutil
import psycopg
import pytest
from psycopg import sql
from psycopg.rows import dict_row

from everbeat.store import migrating
from everbeat.store.target import Target
from tests.invariants import check_invariants, deadlocks, install_audit

FAST: Mapping[str, Any] = {
    "claimer_heartbeat_interval_ms": 1_000,
    "runner_heartbeat_interval_ms": 1_000,
    "claimed_stale_threshold_ms": 2_000,
    "running_stale_threshold_ms": 2_000,
    "check_interval_ms": 1_000,
}
BY_AGE: Mapping[str, Any] = {
    "detect_child_exit": False,
    "detect_session_loss": False,
    "startup_reconciliation": False,
}

# A slow machine can take this much longer than the product promises; stories print the measured times.
SLACK = 3.0

# Each poll runs a statement or reads a file, so frequent polls of five stories would take the time of the code under test.
POLL_S = 0.05


class Tree:
    """One `everbeat worker`: a supervisor, its worker processes and their task processes."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log = log

    @property
    def pid(self) -> int:
        return self.process.pid

    def processes(self) -> list[psutil.Process]:
        try:
            supervisor = psutil.Process(self.pid)
            return [supervisor, *supervisor.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def signal_all(self, number: signal.Signals) -> None:
        for process in self.processes():
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                continue

    def kill(self) -> float:
        """Send SIGKILL to every process of the tree; return the time."""
        doomed = self.processes()
        at = time.monotonic()
        for process in doomed:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait(timeout=30)
        return at

    def freeze(self) -> None:
        self.signal_all(signal.SIGSTOP)

    def thaw(self) -> None:
        self.signal_all(signal.SIGCONT)

    def stop(self) -> int:
        """Send SIGTERM and return the exit code."""
        self.process.terminate()
        return self.process.wait(timeout=60)

    def output(self) -> str:
        return self.log.read_text(errors="replace")


class Scenario:
    """The environment of one story. At its end, it kills remaining processes and checks every invariant."""

    def __init__(self, url: str, schema: str, folder: Path, *, is_migrated: bool = False) -> None:
        self.url = url
        self.schema = schema
        self.folder = folder
        self.effects_file = folder / "effects.jsonl"
        self.effects_file.touch()
        self.gates = folder / "gates"
        self.gates.mkdir()
        self.trees: list[Tree] = []
        self.wake: Mapping[str, Any] | None = None
        self.target = Target.parse(url, schema=schema)
        self.connection = self.target.connect("everbeat story")
        if not is_migrated:
            migrating.migrate(self.connection, self.target)
            install_audit(self.connection, schema)
        self.connection.row_factory = dict_row  # type: ignore[assignment]
        with psycopg.connect(url) as plain:
            self.deadlocks_before = deadlocks(plain)

    # Processes.

    def environment(self, *, recovery: Mapping[str, Any], worker: Mapping[str, Any]) -> dict[str, str]:
        wake = {} if self.wake is None else {"STORY_WAKE": json.dumps(dict(self.wake))}
        return os.environ | wake | {
            "STORY_URL": self.url, "STORY_SCHEMA": self.schema, "STORY_EFFECTS": str(self.effects_file), "STORY_GATES": str(self.gates),
            "STORY_RECOVERY": json.dumps(dict(recovery)), "STORY_WORKER": json.dumps(dict(worker)),
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent / "programs"), os.environ.get("PYTHONPATH", "")]),
        }  # fmt: skip

    def start_tree(
        self,
        *,
        recovery: Mapping[str, Any] = {},
        worker: Mapping[str, Any] = {},
        options: tuple[str, ...] = (),
        url: str | None = None,
        program: str = "sample_tasks",
        prefix: tuple[str, ...] = (),
    ) -> Tree:
        """Start `everbeat worker <program>:app`, through the command `prefix` if given, without waiting for it."""
        log = self.folder / f"tree-{len(self.trees)}.log"
        environment = self.environment(recovery=recovery, worker=worker)
        if url is not None:
            environment["STORY_URL"] = url
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "everbeat", "worker", f"{program}:app", *options],
                env=environment, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        tree = Tree(process, log)
        self.trees.append(tree)
        return tree

    def ready_tree(self, **options: Any) -> Tree:
        """Start a tree and wait until its workers claim."""
        tree = self.start_tree(**options)
        wanted = int(options.get("worker", {}).get("processes", 1))
        self.until(
            lambda: len(self.workers(tree)) >= wanted,
            within=30,
            what=f"a tree with {wanted} workers",
            tree=tree,
        )
        return tree

    def workers(self, tree: Tree) -> list[dict[str, Any]]:
        """Return the rows of the live workers of a tree."""
        return self.query(
            """select w.* from {schema}.workers w join {schema}.supervisors s on s.id = w.supervisor_id
               where s.pid = %s and w.ended_at is null and s.ended_at is null""",
            tree.pid,
        )

    # Observation.

    def query(self, text: str, *parameters: Any) -> list[dict[str, Any]]:
        return self.connection.execute(
            sql.SQL(text).format(schema=sql.Identifier(self.schema)), parameters
        ).fetchall()  # type: ignore[arg-type,return-value]

    def task(self, task_id: UUID) -> dict[str, Any]:
        (row,) = self.query("select * from {schema}.tasks where id = %s", task_id)
        return row

    def states(self) -> dict[str, int]:
        return {
            row["state"]: row["count"]
            for row in self.query("select state, count(*) from {schema}.tasks group by state")
        }

    def attempts(self, task_id: UUID) -> list[dict[str, Any]]:
        return self.query("select * from {schema}.attempts where task_id = %s order by attempt", task_id)

    def recoveries(self, task_id: UUID | None = None) -> list[dict[str, Any]]:
        if task_id is None:
            return self.query("select * from {schema}.recoveries order by id")
        return self.query("select * from {schema}.recoveries where task_id = %s order by id", task_id)

    def effects(self, step: str | None = None, task_id: UUID | None = None) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.effects_file.read_text().splitlines()]
        return [
            line
            for line in lines
            if (step is None or line["step"] == step) and (task_id is None or line["task"] == str(task_id))
        ]

    def open_gate(self, name: str) -> None:
        (self.gates / name).touch()

    def hold_processes(self) -> None:
        """Keep task processes that start from now on unready, so their tasks stay CLAIMED, until `release_processes`."""
        self.open_gate("no processes")

    def release_processes(self) -> None:
        (self.gates / "no processes").unlink()

    def until(
        self, truth: Callable[[], object], *, within: float, what: str = "it", tree: Tree | None = None
    ) -> float:
        """Wait until the condition holds and return the seconds; fail with the logs of the trees."""
        began = time.monotonic()
        while not truth():
            if tree is not None and tree.process.poll() is not None:
                raise AssertionError(f"the tree ended while waiting for {what}:\n{tree.output()[-4000:]}")
            if time.monotonic() - began > within:
                logs = "\n".join(f"--- {one.log.name}\n{one.output()[-3000:]}" for one in self.trees)
                raise AssertionError(f"{what}: not within {within} s; states {self.states()}\n{logs}")
            time.sleep(POLL_S)  # the story polls what any operator can see from outside
        took = time.monotonic() - began
        print(f"{what}: {took:.2f} s")
        return took

    def until_logged(self, tree: Tree, word: str, *, within: float = 20) -> None:
        """Wait until the word is in the tree's log: a process can log an event after others have seen its effect."""
        self.until(lambda: word in tree.output(), within=within, what=f"{word!r} is logged", tree=tree)

    def state_is(self, task_id: UUID, *states: str) -> Callable[[], bool]:
        return lambda: self.task(task_id)["state"] in states

    def started(self, task_id: UUID, times: int = 1) -> Callable[[], bool]:
        return lambda: len(self.effects("start", task_id)) >= times

    def close(self, *, check: bool = True) -> None:
        try:
            self._end(check=check)
        finally:
            self.connection.close()

    def _end(self, *, check: bool) -> None:
        for tree in self.trees:
            if tree.process.poll() is None:
                tree.thaw()
                tree.kill()
        if check:
            # Tasks in flight at the end of the story have no holder: only pending and ended tasks are judged.
            with psycopg.connect(self.url, autocommit=True) as connection:
                wait_for_last_statements(connection)
                connection.execute(
                    sql.SQL(
                        "update {}.workers set ended_at = now(), ended_how = 'story' where ended_at is null"
                    ).format(sql.Identifier(self.schema))
                )
                open_leases = connection.execute(
                    sql.SQL("select count(*) from {}.tasks where claim_id is not null").format(
                        sql.Identifier(self.schema)
                    )
                ).fetchone()
            if open_leases == (0,):
                check_invariants(self.url, self.schema, deadlocks_before=self.deadlocks_before)


def wait_for_last_statements(connection: psycopg.Connection[Any]) -> None:
    """Wait until no other session executes a statement: the server finishes those of killed processes, some seconds at most."""
    active = (
        "select from pg_stat_activity where state = 'active' and backend_type = 'client backend'"
        " and datname = current_database() and pid <> pg_backend_pid()"
    )
    give_up_at = time.monotonic() + 5
    while connection.execute(active).rowcount and time.monotonic() < give_up_at:
        time.sleep(0.02)  # the server sends no event


@contextmanager
def new_scenario(
    url: str, schema: str, folder: Path, *, check: bool = True, is_migrated: bool = False
) -> Iterator[Scenario]:
    """Create a scenario; at its end, check the invariants unless the story itself failed."""
    scenario = Scenario(url, schema, folder, is_migrated=is_migrated)
    try:
        yield scenario
    except BaseException:
        scenario.close(check=False)
        raise
    scenario.close(check=check)


@contextmanager
def program_of(scenario: Scenario, name: str = "sample_tasks") -> Iterator[ModuleType]:
    """Import a program of the stories as a sender does, with the scenario's current URL."""
    folder = Path(__file__).parent / "programs"
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in scenario.environment(recovery={}, worker={}).items():
            if variable.startswith("STORY_"):
                patch.setenv(variable, value)
        patch.syspath_prepend(str(folder))
        program = importlib.import_module(name)
        try:
            yield program
        finally:
            program.app.close()
            for known in folder.glob(
                "*.py"
            ):  # programs import one another, and each has read its environment
                sys.modules.pop(known.stem, None)
