"""A supervisor of worker processes; its arguments are those of `worker_process`, which it passes on."""

import asyncio
import logging
import sys
from pathlib import Path
from random import Random

from everbeat.errors import EverbeatError
from everbeat.runtime.clock import SystemClock
from everbeat.runtime.events import EventBus, log_event
from everbeat.worker.supervisor import Supervisor

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.worker.supervising import supervision_for


async def supervise(arguments: list[str]) -> None:
    events = EventBus()
    events.subscribe(log_event)
    supervisor = Supervisor(
        [sys.executable, str(Path(__file__).with_name("worker_process.py")), *arguments],
        supervise=lambda hello: supervision_for(hello, events=events),
        events=events,
        clock=SystemClock(),
        random=Random(),
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
