"""Workers whose statements a test of the dashboard runs itself."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from everbeat.domain.task.steps import ANSWER_PREFIX
from everbeat.store import steps
from tests.store.conftest import StoreHarness


@dataclass
class Workers:
    """Supervisor s1 with workers w1 and w2, whose statements the test runs itself."""

    db: StoreHarness

    def send(self, name: str = "charge", *, arguments: Any = None, **options: Any) -> UUID:
        """Send a task."""
        return self.db.send(name, args=json.dumps(arguments or {}).encode(), **options)

    def start(self, name: str = "charge", *, worker: str = "w1", **options: Any) -> Any:
        """Send a task, claim it and start it. Return its lease."""
        sent = self.send(name, **options)
        found = self.db.claim(worker, names=(name,))
        (claimed,) = [each for each in found if each.id == sent]
        assert self.db.start(claimed) == ["started"]
        return claimed

    def fail(self, name: str = "charge", *, error: dict[str, Any] | None = None, **options: Any) -> UUID:
        """Send a task and let it fail."""
        claimed = self.start(name, **options)
        stored = {
            "code": "REFUSED",
            "message": "the bank said no",
            "type": "shop.Refused",
            "data": None,
            "traceback": "",
        }
        assert (
            self.db.settle(claimed, "FAILED", error=json.dumps(stored | (error or {})).encode()) == "FAILED"
        )
        return claimed.id

    def ask(self, text: str, *, note: str | None = None, **kind: Any) -> UUID:
        """Send a task whose code asks a person, and suspend it."""
        claimed = self.start()
        asked = json.dumps({"question": text, "type": kind, "note": note})
        event = f"{ANSWER_PREFIX}refund"
        self.db.run(
            steps.wait_for_signal(
                claimed.id, claimed.claim_id, name=event, event=event, timeout_ms=None, question=asked
            )
        )
        assert self.db.settle(claimed, "SUSPENDED") == "PENDING"
        return claimed.id
