"""Running the one coroutine that is a process, whatever the code beside it on the loop does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")

_log = logging.getLogger("everbeat.runtime")


def run_through(main: Coroutine[Any, Any, Result]) -> Result:
    """Run `main` to its end in a new loop, though stray tasks on that loop call `sys.exit` or raise KeyboardInterrupt."""
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        task = loop.create_task(main)
        while True:
            try:
                return loop.run_until_complete(task)
            except (SystemExit, KeyboardInterrupt) as problem:
                # asyncio lets these two pass from any of its tasks. One that is our own ends us.
                if task.done():
                    raise
                _log.error("exit_refused reason=%r", problem)
