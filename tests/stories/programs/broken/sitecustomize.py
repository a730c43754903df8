"""Breaks one promise in every process of a tree: Python imports this at its start, where the folder is on its path."""

from __future__ import annotations

import os
import time
from random import Random
from typing import NoReturn

from everbeat.domain.policy import StoredPolicy
from everbeat.store.leases import Settlement
from everbeat.store.stopped import stop_settlement
from everbeat.worker import conductor, farewell
from everbeat.worker.attempt import Attempt, Ended

kept = conductor.settlement_of
leave = farewell.leave


def settle_running_code(attempt: Attempt, ended: Ended | None, *, random: Random) -> Settlement | None:
    """As if a thread ended when its worker stops."""
    if ended is None and attempt.stopped == "shutting_down":
        return stop_settlement(attempt.id, attempt.claim_id, policy=attempt.policy)
    return kept(attempt, ended, random=random)


def linger(code: int) -> NoReturn:
    """The process of the thread is still there when the second run begins."""
    time.sleep(5)  # longer than another tree needs to take the task
    leave(code)


match os.environ.get("STORY_BREAKS"):
    case "policy":
        StoredPolicy.retries_stop = property(lambda _: True)  # type: ignore[method-assign,assignment]
    case "order":
        conductor.settlement_of = settle_running_code
        farewell.leave = linger
