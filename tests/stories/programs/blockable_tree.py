"""Runs `everbeat worker` in a supervisor whose event loop stands still for some seconds after SIGUSR1."""

from __future__ import annotations

import os
import signal
import sys
import time

from everbeat.cli.worker_tree import main
from everbeat.domain import probes


def block(number: int, frame: object) -> None:
    time.sleep(float(os.environ["STORY_BLOCK_S"]))


if __name__ == "__main__":
    probes.SHORTEST_LOOP_LIMIT_S = 1.0  # type: ignore[misc]
    signal.signal(signal.SIGUSR1, block)
    main(sys.argv[sys.argv.index("worker") :])
