"""Run a supervisor of worker processes; it passes its arguments to `worker_process`."""

import asyncio
import logging
import sys
from pathlib import Path

from everbeat.errors import EverbeatError
from everbeat.runtime.environment import ProcessEnvironment
from everbeat.runtime.events import EventBus, log_event
from everbeat.supervisor.supervisor import Supervisor

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.supervisor.supervising import supervision_for


async def supervise(arguments: list[str]) -> None:
    events = EventBus()
    events.subscribe(log_event)
    supervisor = Supervisor(
        [sys.executable, str(Path(__file__).with_name("worker_process.py")), *arguments],
        supervise=lambda hello: supervision_for(hello, events=events),
        environment=ProcessEnvironment(events=events),
    )
    await supervisor.run()


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(name)s %(message)s")
    try:
        asyncio.run(supervise(sys.argv[1:]))
    except EverbeatError as problem:
        print(f"refused: {problem}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
