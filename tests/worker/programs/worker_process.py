"""A worker process with the deeds of the tests. Arguments: URL, schema, settings of recovery, settings of the worker."""

import json
import logging
import sys
import time
from pathlib import Path
from random import Random

from everbeat.config import RecoveryConfig, WorkerConfig
from everbeat.runtime.clock import SystemClock
from everbeat.runtime.events import EventBus, log_event
from everbeat.services.recovery import Recoverer
from everbeat.store.session import Session
from everbeat.store.target import Target
from everbeat.wake.postgres import PostgresWake
from everbeat.worker.farewell import leave
from everbeat.worker.link import Link
from everbeat.worker.plan import WorkerPlan
from everbeat.worker.protocol import Hello, Welcome
from everbeat.worker.worker import Worker
from everbeat.worker.worker_process import prepare_process, refuse_to_start, run_worker_process


def main() -> None:
    sock = prepare_process()
    url, schema, recovery_text, worker_text = sys.argv[1:5]
    if "--refuse" in sys.argv:
        refuse_to_start(sock, code="APP_NOT_FOUND", message="there is no app")
        sys.exit(1)
    if "--die" in sys.argv:
        sys.exit(3)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(name)s %(message)s")
    sys.path.insert(0, str(Path(__file__).parents[3]))
    from tests.worker.deeds import APP_CODES, DEFINITIONS

    target = Target.parse(url, schema=schema)
    recovery = RecoveryConfig(**json.loads(recovery_text))
    config = WorkerConfig(**json.loads(worker_text))
    events = EventBus()
    events.subscribe(log_event)
    clock, random = SystemClock(), Random()

    def make_worker(welcome: Welcome, link: Link) -> Worker:
        recoverer = Recoverer(
            Session(target, f"{welcome.session_name} worker"), recovery, channel=target.channel,
            observer_id=lambda: welcome.supervisor_id, events=events, clock=clock, random=random,
        )  # fmt: skip
        plan = WorkerPlan(
            target=target, definitions=DEFINITIONS, config=config, recovery=recovery, exception_codes=APP_CODES,
            task_process_argv=[sys.executable, str(Path(__file__).with_name("task_process.py"))],
        )  # fmt: skip
        return Worker(
            plan, welcome=welcome, link=link,
            make_wake=lambda name: PostgresWake(lambda: target.aconnect(name), target.channel),
            recover_crashed=recoverer.recover_lease, recover_stalled=recoverer.recover_stalled, events=events, clock=clock, random=random,
        )  # fmt: skip

    hello = Hello(
        url=url, schema=schema, recovery=recovery.to_dict(), worker=config.to_dict(), queues=None,
        task_names=sorted(DEFINITIONS), on_loop=[name for name, each in DEFINITIONS.items() if each.run_in == "async"],
    )  # fmt: skip
    if "--slow" in sys.argv:
        time.sleep(3)  # an app that takes its time to import
    leave(run_worker_process(sock, hello=hello, make_worker=make_worker))


if __name__ == "__main__":
    main()
