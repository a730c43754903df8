"""A worker process without a supervisor of its own, with the deeds of the tests: `lone_worker.py URL SCHEMA`."""

import logging
import sys
from pathlib import Path
from random import Random
from uuid import UUID

from everbeat.config import RecoveryConfig, WorkerConfig
from everbeat.domain.stall import Stall
from everbeat.runtime.clock import SystemClock
from everbeat.runtime.events import EventBus
from everbeat.runtime.exit_report import ExitReport
from everbeat.store.target import Target
from everbeat.wake.postgres import PostgresWake
from everbeat.worker.conductor import OnLeft
from everbeat.worker.farewell import leave
from everbeat.worker.link import Link
from everbeat.worker.plan import WorkerPlan
from everbeat.worker.protocol import Hello, Welcome
from everbeat.worker.worker import Worker
from everbeat.worker.worker_process import prepare_process, run_worker_process


async def recover_crashed(task_id: UUID, claim_id: UUID, report: ExitReport, on_left: OnLeft) -> None:
    raise AssertionError((task_id, claim_id, report))


async def recover_stalled(task_id: UUID, claim_id: UUID, stall: Stall, on_left: OnLeft) -> None:
    raise AssertionError((task_id, claim_id, stall))


def main() -> None:
    sock = prepare_process()
    logging.basicConfig(level=logging.WARNING)
    sys.path.insert(0, str(Path(__file__).parents[3]))
    from tests.worker.deeds import APP_CODES, DEFINITIONS

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

    def make_worker(welcome: Welcome, link: Link) -> Worker:
        return Worker(
            plan,
            welcome=welcome,
            link=link,
            make_wake=lambda name: PostgresWake(lambda: target.aconnect(name), target.channel),
            recover_crashed=recover_crashed,
            recover_stalled=recover_stalled,
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
