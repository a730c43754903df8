"""Running the one coroutine that is a process, whatever the code beside it on the loop does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from everbeat.runtime.fork import loop_of_this_thread
from everbeat.runtime.threads import LastingExecutor

Result = TypeVar("Result")

WIND_UP_PATIENCE_S: Final = 0.5
"""How long what is left on the loop may take to end. Not asyncio.Runner, which waits for ever for code that swallows its cancellation."""

_log = logging.getLogger("everbeat.runtime")


def run_through(main: Coroutine[Any, Any, Result]) -> Result:
    """Run `main` to its end in a new loop, though stray tasks on that loop call `sys.exit`, raise KeyboardInterrupt or never end."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    loop.set_default_executor(LastingExecutor())
    with loop_of_this_thread(loop):
        try:
            return _run_to_its_end(loop, main)
        finally:
            try:
                _run_to_its_end(loop, _wind_up())
            finally:
                asyncio.set_event_loop(None)
                loop.close()


def _run_to_its_end(loop: asyncio.AbstractEventLoop, main: Coroutine[Any, Any, Result]) -> Result:
    task = loop.create_task(main)
    while True:
        try:
            return loop.run_until_complete(task)
        except (SystemExit, KeyboardInterrupt) as problem:
            # asyncio lets these two pass from any of its tasks. One that is our own ends us.
            if task.done():
                raise
            _log.error("exit_refused reason=%r", problem)


async def _wind_up() -> None:
    loop = asyncio.get_running_loop()
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    if left:
        _, deaf = await asyncio.wait(left, timeout=WIND_UP_PATIENCE_S)
        if deaf:
            _log.warning("left_behind tasks=%s", ", ".join(sorted(task.get_name() for task in deaf)))
    ending = loop.create_task(loop.shutdown_asyncgens())
    await asyncio.wait({ending}, timeout=WIND_UP_PATIENCE_S)
