"""Run a worker process without a supervisor, with the sample tasks: `lone_worker.py URL SCHEMA`."""

import logging
import sys
from pathlib import Path
from random import Random

from everbeat.config import RecoveryConfig, WorkerConfig
from everbeat.domain.recovery.decision import Stall
from everbeat.hints.postgres import PostgresHintSource
from everbeat.protocol import Hello, LeaseKey, Welcome
from everbeat.runtime.clock import SystemClock
from everbeat.runtime.events import EventBus
from everbeat.runtime.main_loop import leave
from everbeat.runtime.processes import ExitReport
from everbeat.store.target import Target
from everbeat.worker.environment import SupervisorLink, WorkerPlan
from everbeat.worker.process import prepare_process, run_worker_process
from everbeat.worker.worker import Worker


async def recover(lease: LeaseKey, loss: ExitReport | Stall, died_at: float) -> bool:
    raise AssertionError((lease, loss, died_at))


def main() -> None:
    sock = prepare_process()
    logging.basicConfig(level=logging.WARNING)
    sys.path.insert(0, str(Path(__file__).parents[3]))
    from tests.worker.sample_tasks import APP_CODES, DEFINITIONS

    target = Target.parse(sys.argv[1], schema=sys.argv[2])
    program = str(Path(__file__).parent / "task_process.py")
    plan = WorkerPlan(
        target=target,
        definitions=DEFINITIONS,
        config=WorkerConfig(process_concurrency=1),
        recovery=RecoveryConfig(),
        exception_codes=APP_CODES,
        task_process_argv=[sys.executable, program],
    )

    def make_worker(welcome: Welcome, link: SupervisorLink) -> Worker:
        return Worker(
            plan,
            welcome=welcome,
            link=link,
            make_hint_source=lambda name: PostgresHintSource(lambda: target.aconnect(name), target.channel),
            recover=recover,
            events=EventBus(),
            clock=SystemClock(),
            random=Random(),
        )

    hello = Hello(
        url=target.url,
        schema=target.schema,
        recovery=plan.recovery.to_dict(),
        worker=plan.config.to_dict(),
        queues=None,
        task_names=sorted(DEFINITIONS),
    )
    leave(run_worker_process(sock, hello=hello, make_worker=make_worker))


if __name__ == "__main__":
    main()
