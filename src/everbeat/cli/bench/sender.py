"""One program that sends: so many tasks, one at a time, from the moment it is told to.

`python -m everbeat.cli.bench.sender MODULE COUNT` answers "ready", begins when its input brings a line, and answers when it began and when
it had ended, by the machine's monotonic clock. Its database is in the environment.
"""

from __future__ import annotations

import sys
from typing import Any, cast

from everbeat.cli.bench.crew import Program
from everbeat.cli.locate import load
from everbeat.runtime.clock import SystemClock

_WARM_UP = 5


def main() -> None:
    """Sends to a queue that nobody serves."""
    module, count = sys.argv[1:]
    program: Program = cast(Any, load(module))
    clock = SystemClock()
    for _ in range(_WARM_UP):  # connects
        program.app.queues()
    print("ready", flush=True)
    sys.stdin.readline()
    began = clock.monotonic()
    for number in range(int(count)):
        program.nothing.send(number)
    print(began, clock.monotonic(), flush=True)
    program.app.close()


if __name__ == "__main__":
    main()
