"""Recovery of a worker's own attempts whose task process exited or whose code stalled."""

from __future__ import annotations

from everbeat.domain.recovery.decision import Stall
from everbeat.domain.series import RateCounter
from everbeat.protocol import LeaseKey, Welcome
from everbeat.recovering.hooks import LocalHooks
from everbeat.recovering.observer import NoObserver, RecoveryEnvironment
from everbeat.recovering.orders import Death
from everbeat.recovering.recoverer import Recoverer
from everbeat.runtime.environment import ProcessEnvironment
from everbeat.runtime.processes import ExitReport
from everbeat.store.session import Session
from everbeat.worker.environment import WorkerPlan


class AttemptRecovery:
    """Recovers attempts the way a supervisor would. Its database connection is open only while attempts are being recovered."""

    def __init__(
        self,
        plan: WorkerPlan,
        *,
        welcome: Welcome,
        environment: ProcessEnvironment,
        rates: RateCounter | None = None,
    ) -> None:
        self._session = Session(plan.target, f"{welcome.session_name} worker", random=environment.random)
        self._recoverer = Recoverer(
            RecoveryEnvironment(
                statements=self._session,
                config=plan.recovery,
                channel=plan.target.channel,
                observer=NoObserver(welcome.worker_id),
                events=environment.events,
                clock=environment.clock,
                random=environment.random,
                hooks=LocalHooks(
                    plan.hooks,
                    timeout_s=plan.recovery.hook_timeout_ms / 1_000,
                    events=environment.events,
                ),
                rates=RateCounter() if rates is None else rates,
            )
        )
        self._users = 0

    async def recover(self, lease: LeaseKey, loss: ExitReport | Stall, died_at: float) -> bool:
        """Recover one attempt. Return False if a hook left the attempt unchanged.

        `died_at` is when the attempt was lost, on the monotonic clock.
        """
        self._users += 1
        try:
            if isinstance(loss, Stall):
                recovered = await self._recoverer.recover_attempt(*lease, Death.by_stall(loss))
            else:
                death = Death.by_exit(loss, after_s=0.0, pid=loss.pid)
                recovered = await self._recoverer.recover_attempt(*lease, death, died_at=died_at)
            return recovered != "left"
        finally:
            self._users -= 1
            if not self._users:
                await self._session.drop()
