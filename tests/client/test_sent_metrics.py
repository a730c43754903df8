"""An app counts the tasks that it sends in this process. The parser of the Prometheus client reads the counts."""

from __future__ import annotations

import os
from operator import add

import pytest

from everbeat import App
from everbeat.domain.metrics.text import bounded
from everbeat.runtime.sent_counter import MOST_KEPT, SentCounter
from tests.domain.test_metrics import samples
from tests.store.conftest import StoreHarness


def sent(app: App) -> dict[tuple[str, str], float]:
    found = samples(app.metrics_text())["everbeat_tasks_sent_total"]
    return {(dict(labels)["queue"], dict(labels)["task"]): value for labels, value in found.items()}


async def test_each_stored_task_counts_once_in_its_queue(app: App, db: StoreHarness) -> None:  # O5
    @app.task(queue="mail")
    def welcome(user: int) -> None: ...

    assert sent(app) == {("mail", "welcome"): 0}
    await welcome.asend(1)
    await app.asend_many([welcome.call(user) for user in range(3)])
    await welcome.with_options(queue="slow", key="k").asend(4)
    await welcome.with_options(queue="slow", key="k").asend(5)  # the task exists
    await app.asend_by_name("elsewhere", {}, queue="far")
    assert sent(app) == {("mail", "welcome"): 4, ("slow", "welcome"): 1, ("far", "elsewhere"): 1}
    states = "select queue, count(*) from {schema}.tasks group by queue"
    rows = db.connection.execute(db.plain(states)).fetchall()
    assert dict(rows) == {"mail": 4, "slow": 1, "far": 1}


def test_a_send_that_fails_does_not_count() -> None:
    away = App("postgresql://nobody@127.0.0.1:1/none?connect_timeout=1", patience="100ms")

    @away.task
    def welcome() -> None: ...

    with pytest.raises(Exception, match=r"127\.0\.0\.1"):
        welcome.send()
    away.close()
    assert sent(away) == {("default", "welcome"): 0}


def test_a_label_has_at_most_200_names() -> None:
    counter = SentCounter()
    for number in range(3_000):
        counter.count("default", f"task{number:04}")
    kept = counter.totals()
    assert len(kept) == MOST_KEPT + 1
    assert kept["other", "other"] == 2_000
    joined = bounded(bounded(kept, add, label=1), add)
    assert len(joined) == 201
    assert sum(joined.values()) == 3_000


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_counts_its_own_sends(app: App, db: StoreHarness) -> None:
    app._sender.sent.count("default", "work")
    child = os.fork()
    if not child:
        os._exit(0 if app._sender.sent.totals() == {} else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert app._sender.sent.totals() == {("default", "work"): 1}
