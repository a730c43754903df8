"""All that a supervisor takes care of besides its own workers, put together in one place.

What lives here: which caretakers there are, by the configuration. What may not: what they do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import TypedDict

from everbeat.config import RecoveryConfig
from everbeat.domain.commands import SWEEP
from everbeat.domain.hooks import HookRunner
from everbeat.runtime.clock import Clock
from everbeat.runtime.events import EventBus
from everbeat.runtime.exit_report import ExitReport
from everbeat.runtime.identity import ProcessIdentity
from everbeat.runtime.service import Service
from everbeat.services.expirer import Expirer
from everbeat.services.leftovers import Leftovers
from everbeat.services.observer import Observer
from everbeat.services.pruner import Pruner, SpareStatements
from everbeat.services.reaper import Reaper
from everbeat.services.reconciler import Reconciler, Transactions
from everbeat.services.recovery import Recoverer
from everbeat.services.session_watch import SessionWatch
from everbeat.services.slot import SlotKeeper
from everbeat.services.snapshots import Snapshots
from everbeat.services.stalls import Holder, Stalls
from everbeat.services.startup import Reconciliation
from everbeat.services.stopped import settle_stopped
from everbeat.services.witness import Witness
from everbeat.store.workers import WorkerState


class _OfAll(TypedDict):
    """What everybody works with who finds somebody dead."""

    recoverer: Recoverer
    observer: Observer
    events: EventBus
    clock: Clock


class Caretakers:
    """What a supervision is given: services to run for ever, what to do at the start, and whom to ask when a worker died.

    `command`: what an alarm tells an operator who knows the silent trees dead.
    """

    def __init__(
        self,
        statements: Transactions,
        config: RecoveryConfig,
        *,
        channel: str,
        observer: Observer,
        states: Callable[[], Sequence[WorkerState]],
        open_spare: Callable[[], SpareStatements],
        identity: ProcessIdentity,
        events: EventBus,
        clock: Clock,
        random: Random,
        slot: str | None = None,
        holders: Callable[[], Sequence[Holder]] = list,
        hooks: HookRunner | None = None,
        command: str = SWEEP,
    ) -> None:
        self._statements = statements
        self._config = config
        self._channel = channel
        self._events = events
        self.recoverer = Recoverer(
            statements,
            config,
            channel=channel,
            observer_id=lambda: observer.supervisor_id,
            events=events,
            clock=clock,
            random=random,
            hooks=hooks,
        )
        witness = Witness(
            statements,
            recoverer=self.recoverer,
            observer=observer,
            identity=identity,
            proves_deaths=self.is_reconciling,
        )
        of_all: _OfAll = {"recoverer": self.recoverer, "observer": observer, "events": events, "clock": clock}
        self._reconciliation = Reconciliation(statements, identity=identity, **of_all)
        by_silence = (Reaper(statements, config, witness=witness, command=command, **of_all),)
        by_session = (SessionWatch(statements, config, witness=witness, command=command, **of_all),)
        leftovers = (Leftovers(statements, config, events=events),)
        by_progress = (Stalls(statements, holders=holders, recoverer=self.recoverer, clock=clock),)
        by_slot = (SlotKeeper(statements, config, slot=slot or "", witness=witness, **of_all),)
        self.services: tuple[Service, ...] = (
            *(by_session if self.is_recovering and config.detect_session_loss else ()),
            *(by_silence if self.is_recovering else ()),
            *(leftovers if self.is_recovering else ()),
            *(by_progress if config.auto_fail_stale_running else ()),
            *(by_slot if self.is_reconciling and slot is not None else ()),
            Expirer(statements, config, channel=channel, observer=observer),
            Reconciler(statements, config, channel=channel, observer=observer, events=events),
            Snapshots(statements, config, states=states),
            Pruner(statements, config, observer=observer, open_spare=open_spare, events=events, clock=clock),
        )

    @property
    def is_recovering(self) -> bool:
        """Whether any half of automatic recovery is on; without, nobody is judged and nothing is touched."""
        return self._config.auto_requeue_stale_claimed or self._config.auto_fail_stale_running

    @property
    def is_reconciling(self) -> bool:
        """Whether proof of a death is asked for where this supervisor starts."""
        return self.is_recovering and self._config.startup_reconciliation

    async def start(self) -> None:
        """What is provably dead on this machine is recovered at once."""
        if self.is_reconciling:
            await self._reconciliation.run()

    async def settle_stopped(self, worker_id: str, *, code_runs: bool = False) -> None:
        """Settles the code that ended with a stopped worker process, by what each policy says of a stop."""
        await settle_stopped(
            self._statements, worker_id, channel=self._channel, events=self._events, code_runs=code_runs
        )

    async def recover_worker(
        self, worker_id: str, report: ExitReport, *, died_at: float, astray: int
    ) -> None:
        """Settles what a buried worker process held, until it lands."""
        await self.recoverer.recover_worker(worker_id, report, died_at=died_at, astray=astray)
