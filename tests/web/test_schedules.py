"""The schedules in the list: those whose runs fail are seen without opening them, also without colour."""

from __future__ import annotations

import json
import re

from tests.store.scheduling import decide, decision, make_due, put, sent
from tests.web.conftest import NewVisitor, Workers


async def test_a_schedule_whose_last_ended_run_failed_says_so_in_words(
    workers: Workers, new_visitor: NewVisitor
) -> None:
    db, error = workers.db, json.dumps({"code": "REFUSED", "message": "no", "type": "x.No", "data": None})
    for name in ("failing", "fine", "new"):
        put(db, name, call={"task": "charge"})
    for name, state, last in (("failing", "FAILED", "RUNNING"), ("fine", "COMPLETED", "COMPLETED")):
        for number, end in enumerate((state, last), start=1):
            seen = make_due(db, name)
            decide(db, decision(seen, sent(seen, number)))
            (claimed,) = db.claim("w1", names=("charge",))
            assert db.start(claimed) == ["started"]
            if end != "RUNNING":
                db.settle(claimed, end, error=error.encode() if end == "FAILED" else None)
    visitor = new_visitor("read")
    document = await visitor.json("/schedules")
    assert document["says"] == "The last run of failing has failed"
    states = {name: run and run["state"] for name, run in document["last_runs"].items()}
    assert states == {"failing": "FAILED", "fine": "COMPLETED", "new": None}
    page = (await visitor.get("/schedules")).text
    cells = re.findall(r'data-h="Last run">(.*?)</td>', page)
    assert [re.match("[a-z]+", re.sub(r"<[^>]+>", "", cell)).group() for cell in cells] == [
        "failed",
        "completed",
        "none",
    ]
