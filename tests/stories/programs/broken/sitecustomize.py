"""Breaks one promise in every process of a tree: Python imports this at its start, where the folder is on its path."""

from __future__ import annotations

import os
from random import Random

from everbeat.domain.policy import StoredPolicy
from everbeat.store.leases import Settlement
from everbeat.store.stopped import stop_settlement
from everbeat.worker import conductor
from everbeat.worker.attempt import Attempt, Ended

kept = conductor.settlement_of


def settle_running_code(attempt: Attempt, ended: Ended | None, *, random: Random) -> Settlement | None:
    """As if a thread ended when its worker stops."""
    if ended is None and attempt.stopped == "shutting_down":
        return stop_settlement(attempt.id, attempt.claim_id, policy=attempt.policy)
    return kept(attempt, ended, random=random)


match os.environ.get("STORY_BREAKS"):
    case "policy":
        StoredPolicy.retries_stop = property(lambda _: True)  # type: ignore[method-assign,assignment]
    case "order":
        conductor.settlement_of = settle_running_code
