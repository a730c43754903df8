"""Break one promise in every process of a tree: Python imports this at its start if the folder is on its path."""

from __future__ import annotations

import os
import time
from random import Random
from typing import NoReturn

from everbeat.domain.task.policy import StoredPolicy
from everbeat.runtime import main_loop
from everbeat.store.leases import Settlement, stop_settlement
from everbeat.worker import lifecycle
from everbeat.worker.attempt import Attempt, AttemptEnd

kept = lifecycle.settlement_of
leave = main_loop.leave


def settle_running_code(attempt: Attempt, ended: AttemptEnd | None, *, random: Random) -> Settlement | None:
    """Treat a thread as ended when its worker stops."""
    if ended is None and attempt.stopped == "shutting_down":
        return stop_settlement(attempt.id, attempt.claim_id, policy=attempt.policy)
    return kept(attempt, ended, random=random)


def linger(code: int) -> NoReturn:
    """Keep the process of the thread alive when the second run begins."""
    time.sleep(5)  # longer than another tree needs to take the task
    leave(code)


match os.environ.get("STORY_BREAKS"):
    case "policy":
        StoredPolicy.retries_stop = property(lambda _: True)  # type: ignore[method-assign,assignment]
    case "order":
        lifecycle.settlement_of = settle_running_code
        main_loop.leave = linger
