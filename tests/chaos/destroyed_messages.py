"""The last fault of a run with NATS. After everything else has recovered, tasks are sent and their messages are destroyed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Final

from everbeat import App
from tests.chaos.clock import boot_s
from tests.chaos.nats_faults import asked
from tests.chaos.nats_side import NatsSide
from tests.chaos.tree_oracles import CANARY

TASKS: Final = 5
FOUND_WITHIN_S: Final = 20.0
"""The time limit, in seconds. It is much shorter than the workers' poll interval."""

_NAME: Final = "quick"
_FIRST_NUMBER: Final = 1_000_000_000
_ARRIVE_WITHIN_S: Final = 10.0
_LOOK_EVERY_S: Final = 0.05


def destroy_messages(side: NatsSide, app: App, folder: Path, unended: Callable[[], int]) -> float | None:
    """Send tasks and destroy their messages. Return the seconds until the tasks finished.

    Return None if the tasks did not finish within `FOUND_WITHIN_S` seconds.
    """
    numbers = list(range(_FIRST_NUMBER, _FIRST_NUMBER + TASKS))
    with closing(app), (folder / "producer-last.jsonl").open("a", encoding="utf-8") as log:
        asked(side.pause())
        log.write(json.dumps({"intends": numbers, "names": [_NAME] * TASKS, "at": boot_s()}) + "\n")
        handles = [
            app.send_by_name(_NAME, {"number": number, "seconds": 0.1, "secret": CANARY})
            for number in numbers
        ]
        ids = [str(one.id) for one in handles]
        log.write(json.dumps({"sent": numbers, "ids": ids, "at": boot_s()}) + "\n")
    _until(lambda: _waiting(side) >= TASKS, within_s=_ARRIVE_WITHIN_S)
    asked(side.remove_some(lambda: True))
    asked(side.resume())
    began = boot_s()
    return boot_s() - began if _until(lambda: unended() == 0, within_s=FOUND_WITHIN_S) else None


def _waiting(side: NatsSide) -> int:
    stream = side.stream()
    return 0 if stream is None else int(stream["state"]["messages"])


def _until(truth: Callable[[], bool], *, within_s: float) -> bool:
    deadline = boot_s() + within_s
    while boot_s() < deadline:
        if truth():
            return True
        time.sleep(_LOOK_EVERY_S)  # the run polls from outside, as an operator would
    return False
