"""No page shows a worker as alive, or as serving a queue, that is dead, lost, quiet or about to stop."""

from __future__ import annotations

import re

import pytest

from everbeat.store import workers as worker_statements
from tests.web.conftest import NewVisitor, Workers


async def test_the_page_of_a_dead_process_whose_tree_lives_does_not_say_that_it_beats(
    workers: Workers, new_visitor: NewVisitor
) -> None:
    workers.db.run(worker_statements.bury_workers(worker_ids=["w2"], how="child_exit", cause="SIGKILL"))
    visitor = new_visitor("see")
    page = (await visitor.get("/workers/w2")).text.partition("<main")[2]
    assert re.search(r'class="st dead">.*?</svg>dead</span>', page)
    assert "beats</span>" not in page
    assert "Last beat" not in page
    assert re.search(r"<dt>Ended</dt>.*child exit: SIGKILL", page)
    other = (await visitor.get("/workers/w1")).text.partition("<main")[2]
    assert re.search(r'class="st live">.*?</svg>beats</span>', other)
    assert "<dt>Ended</dt>" not in other


@pytest.mark.parametrize(
    "change",
    [
        "update {schema}.supervisors set quiet_since = now()",
        "update {schema}.supervisors set draining = true",
    ],
    ids=["quiet", "draining"],
)
async def test_a_queue_whose_workers_claim_nothing_is_served_by_none(
    workers: Workers, new_visitor: NewVisitor, change: str
) -> None:
    workers.send(queue="mail")
    visitor = new_visitor("see")
    assert "no worker serves it" not in (await visitor.json("/queues"))["says"]
    workers.db.connection.execute(workers.db.plain(change))
    assert (await visitor.json("/queues"))["says"] == "mail has due tasks, and no worker serves it"


@pytest.mark.parametrize(
    ("silent_s", "state", "counts"),
    [(20, "beats", "1 beat, 0 late"), (70, "late", "0 beat, 1 late"), (400, "suspect", "0 beat, 1 late")],
)
async def test_the_header_of_each_page_counts_a_silent_tree_as_the_pulse_judges_it(
    workers: Workers, new_visitor: NewVisitor, silent_s: int, state: str, counts: str
) -> None:
    workers.db.connection.execute(
        workers.db.plain(
            f"update {{schema}}.supervisors set last_beat_at = now() - interval '{silent_s} s',"
            " started_at = now() - interval '1 h'"
        )
    )
    workers.db.connection.execute(
        workers.db.plain(
            "update {schema}.workers set started_at = now() - interval '1 h', last_beat_at = null"
        )
    )
    visitor = new_visitor("see")
    assert f"Trees: {counts}, 0 dead" in (await visitor.get("/tasks")).text  # no page is watched
    assert [tree["state"] for tree in (await visitor.json("/pulse"))["trees"]] == [state]
    assert f"Trees: {counts}, 0 dead" in (await visitor.get("/tasks")).text
