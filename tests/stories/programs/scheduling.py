"""A supervisor without workers, which decides the ticks of schedules until it is killed."""

from __future__ import annotations

import asyncio
import json
import logging
import os

from everbeat import RecoveryConfig
from everbeat.runtime.environment import logging_environment
from everbeat.runtime.identity import take_tree_lock
from everbeat.runtime.main_loop import run_through
from everbeat.store.target import Target
from everbeat.supervisor.registration import Supervision


async def supervise() -> None:
    """Run the services of a supervisor until this process is killed."""
    target = Target.parse(os.environ["STORY_URL"], schema=os.environ["STORY_SCHEMA"])
    config = RecoveryConfig(**json.loads(os.environ["STORY_RECOVERY"]))
    environment = logging_environment()
    supervision = Supervision(target, config, environment=environment, lock=take_tree_lock())
    await supervision.open(patience_s=60)
    await asyncio.Event().wait()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    run_through(supervise())
