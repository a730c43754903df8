"""Run a worker process with the sample tasks. Arguments: URL, schema, recovery settings, worker settings."""

import json
import logging
import sys
import time
from pathlib import Path
from random import Random

from everbeat.config import RecoveryConfig, WorkerConfig
from everbeat.hints.postgres import PostgresHintSource
from everbeat.protocol import Hello, Welcome
from everbeat.runtime.clock import SystemClock
from everbeat.runtime.environment import ProcessEnvironment
from everbeat.runtime.events import EventBus, log_event
from everbeat.runtime.main_loop import leave
from everbeat.store.target import Target
from everbeat.worker.attempt_recovery import AttemptRecovery
from everbeat.worker.environment import SupervisorLink, WorkerPlan
from everbeat.worker.process import prepare_process, refuse_to_start, run_worker_process
from everbeat.worker.worker import Worker


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
    from tests.worker.sample_tasks import APP_CODES, DEFINITIONS

    target = Target.parse(url, schema=schema)
    recovery = RecoveryConfig(**json.loads(recovery_text))
    config = WorkerConfig(**json.loads(worker_text))
    events = EventBus()
    events.subscribe(log_event)
    clock, random = SystemClock(), Random()

    def make_worker(welcome: Welcome, link: SupervisorLink) -> Worker:
        plan = WorkerPlan(
            target=target, definitions=DEFINITIONS, config=config, recovery=recovery, exception_codes=APP_CODES,
            task_process_argv=[
                sys.executable, str(Path(__file__).with_name("task_process.py")),
                *(flag for flag in sys.argv if flag == "--slow-processes"),
            ],
        )  # fmt: skip
        environment = ProcessEnvironment(events=events, clock=clock, random=random)
        return Worker(
            plan, welcome=welcome, link=link,
            make_hint_source=lambda name: PostgresHintSource(lambda: target.aconnect(name), target.channel),
            recover=AttemptRecovery(plan, welcome=welcome, environment=environment).recover,
            events=events, clock=clock, random=random,
        )  # fmt: skip

    hello = Hello(
        url=url, schema=schema, recovery=recovery.to_dict(), worker=config.to_dict(), queues=None,
        task_names=sorted(DEFINITIONS), on_loop=[name for name, each in DEFINITIONS.items() if each.run_in == "async"],
    )  # fmt: skip
    if "--slow" in sys.argv:
        time.sleep(3)  # stands for an app that is slow to import
    leave(run_worker_process(sock, hello=hello, make_worker=make_worker))


if __name__ == "__main__":
    main()
