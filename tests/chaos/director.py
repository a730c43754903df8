"""The run itself: start everything, follow the plan, end the faults, wait until all tasks have finished, and stop."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TextIO
from uuid import UUID

import psycopg
from psycopg import sql

from everbeat import App
from everbeat.store import migrating
from everbeat.store.target import Target
from tests.chaos.around_oracles import UNENDED, retry_in_bulk, seal_all
from tests.chaos.clock import boot_s
from tests.chaos.cluster import APPLICATION, SESSIONS, Cluster
from tests.chaos.destroyed_messages import destroy_messages
from tests.chaos.evidence import Messages, Timeline
from tests.chaos.faults import FaultImpossible, FaultLog, Targets, injected
from tests.chaos.line import Lines
from tests.chaos.liveness_faults import end_orphans
from tests.chaos.nats_side import AWAY, IN_OUTBOX, NatsSide
from tests.chaos.plan import Fault, Plan
from tests.chaos.producers import ROOT, Producers
from tests.chaos.trees import Tree, left_behind
from tests.chaos.witness import install_witness
from tests.invariants import install_audit

SCHEMA: Final = "chaos"
QUIET_WITHIN_S: Final = 300.0
"""How long the last task can take after the last fault has ended, in seconds."""
STUCK_AFTER_S: Final = 45.0
"""If no task starts or finishes for this many seconds, the run is considered stuck."""

_READY_WITHIN_S: Final = 60.0
_LOOK_EVERY_S: Final = 0.1
_STALL_S: Final = 0.5
_AT_WORK: Final = """
    select count(distinct w.supervisor_id) from {schema}.tasks t join {schema}.workers w on w.id = t.claimed_by_worker_id
    where t.state in ('RUNNING', 'COMPLETED')
"""
_UNENDED: Final = f"""
    select {UNENDED} + (select count(*) from {{0}}.tasks where state in ('PENDING', 'CLAIMED', 'RUNNING'))
        + (select count(*) from {{0}}.workflows where state in ('RUNNING', 'PAUSED', 'CANCELLING'))
"""


_PAUSE: Final = "update {}.schedules set paused_at = now(), next_at = null where paused_at is null"
_SOME_TASKS: Final = "select id, queue, fence from {0}.tasks order by random() limit 500"


class Director:
    """One run in a folder. `source` is the everbeat version that the workers use, if it is not the installed one."""

    def __init__(self, plan: Plan, folder: Path, *, source: Path | None, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._folder = folder
        self._say = say
        self._source = source
        self._over = threading.Event()
        self._log = FaultLog(folder / "faults.jsonl")
        self._skipped: list[str] = []
        self._stalls: list[tuple[float, float]] = []
        self._lines = Lines()
        self._cluster = Cluster(folder, seconds=plan.seconds, paired=plan.liveness)
        self._prepare_schema()
        self._nats = NatsSide(self._lines, schema=SCHEMA) if plan.nats else None
        # Created before a thread shifts the clock: environments are copied from this one.
        environment = self._environment()
        self._producers = Producers(plan, folder, environment=environment)
        self._trees = [
            Tree(
                number,
                line=self._lines.open(*self._cluster.urls),
                environment=environment,
                folder=folder,
                nats_url=None if self._nats is None else self._nats.open_line().url,
            )
            for number in range(plan.trees)
        ]
        self._targets = Targets(
            cluster=self._cluster,
            lines=self._lines,
            trees=self._trees,
            producers_line=self._lines.open(*self._cluster.urls),
            effects=folder / "effects.jsonl",
            over=self._over,
            server=threading.Lock(),
            nats=self._nats,
            tasks=self._some_tasks,
            schema=SCHEMA,
        )

    @property
    def cluster(self) -> Cluster:
        """Return the database of the run."""
        return self._cluster

    @property
    def trees(self) -> list[Tree]:
        """Return the process trees of the run, each with all of its lives."""
        return self._trees

    def run(self) -> Timeline:
        """Run all phases in order, and return their times."""
        began = boot_s()
        pulse = threading.Thread(target=self._record_stalls, daemon=True)
        pulse.start()
        for tree in self._trees:
            tree.start()
        self._await(self._all_ready, _READY_WITHIN_S, "the trees to register")
        ready = boot_s()
        self._say(f"{len(self._trees)} trees are ready after {ready - began:.1f} s")
        self._producers.start(url=self._targets.producers_line.url)
        self._await(self._all_at_work, _READY_WITHIN_S, "all trees to be at work")
        self._run_plan()
        healed = boot_s()
        # Tasks sent while the clock was ahead become due when the clock reaches that time again.
        self._cluster.clock.shift(self._cluster.clock.farthest_s)
        self._say("all faults are healed; waiting for the last task")
        quiet = self._until_quiet()
        messages = None if self._nats is None else self._about_messages(self._nats, quiet)
        asked = boot_s()
        for tree in self._trees:
            tree.ask_to_stop()
        farewells = [tree.wait() for tree in self._trees]
        self._over.set()
        held = self._held_by_orphans()
        return Timeline(
            ready=ready,
            healed=healed,
            quiet=quiet,
            asked=asked,
            exit_codes=tuple(code for code, _ in farewells),
            longest_stop_s=max(seconds for _, seconds in farewells),
            left_behind=tuple(left_behind(self._trees)),
            stalls=tuple(self._stalls),
            skipped=tuple(self._skipped),
            messages=messages,
            held_by_orphans=tuple(held),
        )

    def close(self) -> None:
        """Stop everything that the run started, even after a failure."""
        self._over.set()
        end_orphans(self._folder)
        self._producers.stop()
        for tree in self._trees:
            with suppress(Exception):  # close each part, even if others failed
                tree.kill_all()
        self._lines.close()
        if self._nats is not None:
            self._nats.close()
        self._cluster.close()

    def _prepare_schema(self) -> None:
        target = Target.parse(self._cluster.url, schema=SCHEMA)
        with target.connect("chaos") as connection:
            migrating.migrate(connection, target)
            install_audit(connection, SCHEMA)
            install_witness(connection, SCHEMA)

    def _environment(self) -> dict[str, str]:
        paths = [str(self._source)] if self._source else []
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("EVERBEAT", "PG"))}
        return kept | {
            "CHAOS_SCHEMA": SCHEMA,
            "CHAOS_EFFECTS": str(self._folder / "effects.jsonl"),
            "CHAOS_FORKED": str(self._folder / "forked.jsonl"),
            "CHAOS_PROCESSES": str(self._plan.processes),
            "PYTHONPATH": os.pathsep.join([*paths, str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }

    def _all_ready(self) -> bool:
        for tree in self._trees:
            if not tree.is_alive():
                tail = tree.log.read_text(errors="replace")[-2_000:]
                raise RuntimeError(f"tree {tree.number} ended before it was ready:\n{tail}")
        query = sql.SQL("select count(*) from {}.workers where ended_at is null").format(
            sql.Identifier(SCHEMA)
        )
        return self._count(query) >= self._plan.trees * self._plan.processes

    def _all_at_work(self) -> bool:
        return self._count(sql.SQL(_AT_WORK).format(schema=sql.Identifier(SCHEMA))) >= self._plan.trees

    def _run_plan(self) -> None:
        began = time.monotonic()
        players = [
            threading.Thread(
                target=self._run_fault, args=(fault, began), name=f"fault {fault.number}", daemon=True
            )
            for fault in self._plan.faults
        ]
        players.append(
            threading.Thread(target=self._retry_in_bulk, args=(began,), name="bulk retry", daemon=True)
        )
        for player in players:
            player.start()
        while time.monotonic() < began + self._plan.seconds or any(player.is_alive() for player in players):
            self._restart_the_ended()
            time.sleep(_LOOK_EVERY_S)  # the check that restarts services runs periodically
        self._producers.stop()

    def _retry_in_bulk(self, began: float) -> None:
        self._over.wait(began + self._plan.seconds / 2 - time.monotonic())
        retry_in_bulk(self._targets.producers_line.url, SCHEMA, over=self._over)

    def _run_fault(self, fault: Fault, began: float) -> None:
        self._over.wait(began + fault.at_s - time.monotonic())
        try:
            with injected(fault, self._targets) as detail:
                self._log.write(fault, "began", **detail)
                self._over.wait(fault.lasts_s)
            self._log.write(fault, "ended", **detail)
        except FaultImpossible as reason:
            self._log.write(fault, "skipped", why=str(reason))
            self._skipped.append(f"{fault.kind}: {reason}")
        except Exception as problem:
            self._log.write(fault, "broke", why=f"{type(problem).__name__}: {problem}")
            self._skipped.append(f"{fault.kind} broke: {problem}")
            raise

    def _restart_the_ended(self) -> None:
        """Restart trees that have exited, as a service manager would, except those that a fault keeps down."""
        for tree in self._trees:
            if not tree.is_alive() and not tree.lives[-1].was_killed:
                self._say(f"tree {tree.number} ended by itself with {tree.lives[-1].exit_code}")
                tree.start()

    def _until_quiet(self) -> float | None:
        for tree in self._trees:
            tree.start()
        query = sql.SQL(_UNENDED).format(sql.Identifier(SCHEMA))
        moved = _FileGrowth(self._targets.effects)

        def is_over() -> bool:
            self._restart_the_ended()
            return self._count(query) == 0 or moved.stopped_s() > STUCK_AFTER_S

        with suppress(TimeoutError):
            self._await(self._pause_schedules, QUIET_WITHIN_S, "the schedules to pause")
            self._await(
                lambda: seal_all(self._cluster.url, SCHEMA), QUIET_WITHIN_S, "the batches to be sealed"
            )
            self._await(is_over, QUIET_WITHIN_S, "the last task")
        left = self._count(query)
        if left:
            self._say(
                f"{left} tasks and workflows have not ended, and nothing has moved for {moved.stopped_s():.0f} s"
            )
        return None if left else boot_s()

    def _about_messages(self, nats: NatsSide, quiet: float | None) -> Messages:
        """Return the messages that remain after the run, and how long tasks took whose messages were destroyed."""

        def count(query: str) -> int:
            return self._count(sql.SQL(query).format(sql.Identifier(SCHEMA)))

        seen = nats.await_drained(lambda: count(IN_OUTBOX), lambda: count(AWAY))
        if quiet is None:
            return seen
        app = App(self._cluster.url, schema=SCHEMA)
        return replace(seen, found_after_s=destroy_messages(nats, app, self._folder, lambda: count(_UNENDED)))

    def _held_by_orphans(self) -> list[str]:
        """Return the database sessions of trees that have exited while forked children of task code are alive. Then kill the children.

        A connection that the task's code has opened itself has no name. A child that inherits its socket keeps it open, not everbeat.
        """
        with self._cluster.connection() as connection:
            held = [row[0] for row in connection.execute(SESSIONS, [APPLICATION]).fetchall()]
        held = [each for each in held if "  " not in each]
        if ended := end_orphans(self._folder):
            self._say(f"{ended} forked children have outlived everything and are ended")
        return held

    def _some_tasks(self) -> list[tuple[UUID, str, int]]:
        with suppress(psycopg.Error), self._cluster.connection() as connection:
            return connection.execute(sql.SQL(_SOME_TASKS).format(sql.Identifier(SCHEMA))).fetchall()
        return []

    def _pause_schedules(self) -> bool:
        with self._cluster.connection() as connection:
            connection.execute(sql.SQL(_PAUSE).format(sql.Identifier(SCHEMA)))
        return True

    def _count(self, query: sql.Composed) -> int:
        with self._cluster.connection() as connection:
            row: Any = connection.execute(query).fetchone()
        return int(row[0])

    def _await(self, truth: Callable[[], bool], within_s: float, what: str) -> None:
        deadline = time.monotonic() + within_s
        while True:
            with suppress(psycopg.Error):
                if truth():
                    return
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {within_s:g} s for {what}")
            time.sleep(_LOOK_EVERY_S)  # the run polls from outside, as an operator would

    def _record_stalls(self) -> None:
        """Record when this process was not scheduled, because the machine might also have delayed other processes."""
        last = boot_s()
        while not self._over.is_set():
            time.sleep(0.05)  # the sampling interval
            now = boot_s()
            if now - last > _STALL_S:
                self._stalls.append((last, now))
            last = now


class _FileGrowth:
    """Measures for how long a file has not grown."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._size = -1
        self._since = boot_s()

    def stopped_s(self) -> float:
        """Return the number of seconds since the file was last seen to grow."""
        size = self._path.stat().st_size if self._path.exists() else 0
        if size != self._size:
            self._size, self._since = size, boot_s()
        return boot_s() - self._since


def say_to(stream: TextIO) -> Callable[[str], None]:
    """Return a function that prints a text with the number of seconds since this call."""
    began = boot_s()
    return lambda text: print(f"{boot_s() - began:6.1f} s  {text}", file=stream, flush=True)
