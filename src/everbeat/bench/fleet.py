"""Measure what hundreds of supervisors cost the server, and how soon they notice that a quarter of them died.

The supervisors run in this process with the statements, services and connections of real ones. They start no worker processes: each
registers one worker, which holds one task.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any, Final, TypeVar
from uuid import uuid4

from msgspec.structs import replace

from everbeat.bench.environment import Bench, pause, timed, wait_until
from everbeat.bench.machine import postmaster_of, read_machine
from everbeat.bench.sampling import FigureBound, Measurement, Sample
from everbeat.cli.output import say
from everbeat.config import RecoveryConfig
from everbeat.errors import WorkerError
from everbeat.protocol import REPORT_EVERY_S, Tick
from everbeat.runtime.environment import ProcessEnvironment
from everbeat.runtime.identity import ProcessIdentity
from everbeat.store import claims, workers
from everbeat.store.statement import compose
from everbeat.store.target import Target
from everbeat.supervisor.registration import Supervision
from everbeat.supervisor.workers import SupervisedWorker

T = TypeVar("T")

CONNECTIONS: Final = 3
"""The connections of one supervisor: the session lock, the heartbeats and the services."""
_SPARE_CONNECTIONS: Final = 30
_FEWEST: Final = 8
_AT_ONCE: Final = 10
_SETTLE_S: Final = 22.0
"""By then, all supervisors know how many others there are and which of them watch, and idle sessions have reported the start's statements."""
_IDLE: Final = Tick(running=0, claimed=1, slots=1, cpu_percent=0.0, loop_lag_ms=0.0, names=[])
_RECOVERY_S: Final = 120.0
_SENDS: Final = 100
_LOOKS: Final = 20
_MOST_CORES: Final = 0.2
_MOST_CORES_OF: Final = 500
_START_SHARE: Final = 0.05
"""The cores that watching costs independently of the number of supervisors."""


class _Simulated:
    """One supervisor with one worker. It registers as if it had its own machine."""

    def __init__(self, target: Target, config: RecoveryConfig, number: int) -> None:
        identity = replace(
            ProcessIdentity.current(),
            hostname=f"simulated-{number}",
            boot_id=uuid4().hex,
            machine_id=None,
        )
        self._environment = ProcessEnvironment()
        self.supervision = Supervision(target, config, environment=self._environment, identity=identity)
        self.registered_as = ""
        self._worker = SupervisedWorker(
            pid=os.getpid(),
            queues=None,
            metadata={},
            send=lambda _: None,
            clock=self._environment.clock,
        )

    def report(self) -> None:
        """Report that the worker is idle, as a worker process does every second."""
        self._worker.receive(_IDLE)

    async def open(self, *, claims_of: str | None) -> None:
        """Register the supervisor and its worker. The worker claims one task of the function `claims_of`."""
        await self.supervision.open()
        self.registered_as = self.supervision.supervisor_id
        worker = self._worker
        await self.supervision.register(worker)
        if claims_of is not None:
            claim = claims.claim(
                worker_id=worker.worker_id,
                claim_call=uuid4(),
                names=[claims_of],
                limit=1,
                queues=None,
                queue_priorities={},
            )
            for claimed in await self.supervision.session.run(claim):
                worker.held[claimed.claim_id] = claimed.id


class Fleet:
    """Simulated supervisors on the event loop of one thread. Their application names are those of real ones."""

    def __init__(self, target: Target, config: RecoveryConfig | None = None) -> None:
        self._target = target
        self._config = config or RecoveryConfig()
        self._live: list[_Simulated] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fleet", daemon=True)
        self._thread.start()
        self._reports = asyncio.run_coroutine_threadsafe(self._report(), self._loop)

    @property
    def declared_dead(self) -> list[str]:
        """Return the ids of live supervisors that were declared dead, and so continue under another id."""
        return [
            each.registered_as for each in self._live if each.supervision.supervisor_id != each.registered_as
        ]

    @property
    def watching(self) -> int:
        """Return how many supervisors have a turn to watch."""
        return sum(each.supervision.is_watching for each in self._live)

    def start(self, count: int, *, claims_of: str | None = None) -> None:
        """Start supervisors. The worker of each claims one task of the function `claims_of`."""
        first = len(self._live)
        started = [_Simulated(self._target, self._config, first + number) for number in range(count)]
        self._live += started
        for place in range(0, count, _AT_ONCE):
            self._run(_all(each.open(claims_of=claims_of) for each in started[place : place + _AT_ONCE]))

    def kill(self, count: int) -> list[str]:
        """End supervisors at once, as if their processes had been killed. Return their ids. Some of them watch, if any do."""
        step = max(1, len(self._live) // count)
        doomed = self._live[::step][:count]
        self._live = [each for each in self._live if each not in doomed]
        self._run(_all(each.supervision.abandon() for each in doomed))
        return [each.registered_as for each in doomed]

    def close(self) -> None:
        """Stop all supervisors in order, and end the thread."""
        self._reports.cancel()
        try:
            self._run(_all(each.supervision.close() for each in self._live))
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            for each in self._live:
                each.report()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


async def _all(work: Iterator[Coroutine[Any, Any, object]] | Any) -> None:
    await asyncio.gather(*work)


@contextmanager
def simulated(target: Target, config: RecoveryConfig | None = None) -> Iterator[Fleet]:
    """Yield a fleet without supervisors, and stop its supervisors after the block."""
    fleet = Fleet(target, config)
    try:
        yield fleet
    finally:
        fleet.close()


def fleet_measurements(bench: Bench, *, supervisors: int, watch_s: float) -> Iterator[Measurement]:
    """Yield the measurement of a fleet."""
    yield Measurement(
        name="fleet", take=partial(_fleet_samples, bench, supervisors=supervisors, watch_s=watch_s)
    )


def _fleet_samples(bench: Bench, *, supervisors: int, watch_s: float) -> Iterator[Sample]:
    count = _possible(bench, supervisors)
    bench.execute("truncate_tasks")
    bench.app.send_many(bench.program.nothing.call(number) for number in range(count))
    name = f"fleet of {count}"

    def sample(what: str, value: float, unit: str, at_most: float | None = None) -> Sample:
        target = None if at_most is None else FigureBound(at_most=at_most)
        return Sample(name=f"{name}: {what}", value=value, unit=unit, target=target)

    with simulated(bench.target) as fleet:
        fleet.start(count, claims_of=bench.program.nothing.name)
        pause(_SETTLE_S)
        cores, statements = _cost(bench, watch_s)
        if cores is not None:
            most = _START_SHARE + (_MOST_CORES - _START_SHARE) * max(count, _FEWEST) / _MOST_CORES_OF
            yield sample("processor time of the server", 100 * cores, "% of a core", round(100 * most, 1))
        yield sample("statements", statements, "1/s", max(count, 2 * _FEWEST))
        yield sample("one check of all sessions", _look_ms(bench), "ms")
        yield sample("one send", _send_ms(bench), "ms")
        killed = count // 4
        took_s = timed(lambda: _bury(bench, fleet, killed))
        yield sample(f"kill of {killed}, to the last recovery", took_s, "s", 3)
        yield sample("live ones declared dead", len(fleet.declared_dead), "", 0)


def _possible(bench: Bench, wanted: int) -> int:
    """Return how many of the wanted supervisors the server has connections for."""
    settings = dict(bench.execute("read_settings").fetchall())
    room = (int(settings["max_connections"]) - _SPARE_CONNECTIONS) // CONNECTIONS
    if room < _FEWEST:
        raise WorkerError(
            f"The server permits {settings['max_connections']} connections, too few for {_FEWEST} supervisors.",
            fix=f"raise max_connections to {_FEWEST * CONNECTIONS + _SPARE_CONNECTIONS} or more.",
        )
    if room < wanted:
        say(f"warning: the server's connections suffice for {room} supervisors, so {wanted} are too many.")
        say(f"fix: raise max_connections to {wanted * CONNECTIONS + _SPARE_CONNECTIONS}, or use --url.")
    return min(room, wanted)


def _cost(bench: Bench, watch_s: float) -> tuple[float | None, float]:
    """Return the cores that the server used, or None if the system does not report them, and the statements per second."""
    pid, started_at = bench.execute("read_backend").fetchone()
    server = postmaster_of(int(pid), float(started_at))

    def used() -> tuple[float, float | None]:
        reading = read_machine()
        if reading is None or server is None:
            return 0.0, None
        pids = reading.with_descendants([server])
        # Include the time of backends that have exited, which moves to the postmaster.
        reaped_s = reading.processes[server].reaped_s
        return reading.at_s, reaped_s + sum(reading.processes[each].used_s for each in pids)

    def transactions() -> float:
        return float(bench.execute("measure_cost").fetchone()[0])

    transactions_before, (began_at, before_s) = transactions(), used()
    pause(watch_s)
    (ended_at, after_s), transactions_after = used(), transactions()
    statements = (transactions_after - transactions_before) / watch_s
    if before_s is None or after_s is None:
        return None, statements
    return (after_s - before_s) / (ended_at - began_at), statements


def _look_ms(bench: Bench) -> float:
    look = workers.watch_sessions()
    text = compose(look.name, bench.app.schema)
    return _median_ms(lambda: bench.connection.execute(text, look.parameters).fetchall(), times=_LOOKS)


def _send_ms(bench: Bench) -> float:
    return _median_ms(partial(bench.program.later.send, 0), times=_SENDS)


def _median_ms(work: Callable[[], object], *, times: int) -> float:
    return 1_000 * median([timed(work) for _ in range(times)])


def _bury(bench: Bench, fleet: Fleet, count: int) -> Sequence[str]:
    """Kill supervisors, and wait until the tasks of all of them are recovered."""
    killed = fleet.kill(count)
    name = bench.program.nothing.name
    wait_until(
        lambda: len(bench.app.list_tasks(state=["PENDING"], name=name, limit=count)) >= count,
        within_s=_RECOVERY_S,
        what="the recovery of all tasks of dead supervisors",
        every_s=0.02,
    )
    return killed
