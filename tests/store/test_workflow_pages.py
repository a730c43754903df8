"""The pages of the list of workflows among 120,000 workflows: each reads few pages, and together they list all workflows that match."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import UUID, uuid4

import pytest

from everbeat import App
from everbeat.client.database_access import database_of
from everbeat.client.inspection import workflow_page
from everbeat.store import migrating
from everbeat.store import workflow_control as control
from everbeat.store.statement import Statement
from everbeat.store.target import Target
from tests.store.conftest import StoreHarness
from tests.store.plans import pages_of, plan

ROWS, EXAMINED = 120_000, 5_000
STARTER = UUID(int=7)
FILL = """
insert into {schema}.workflows (id, name, state, on_error, node_count, sent_at, ended_at, parent_task_id)
select (lpad(to_hex(n), 12, '0') || '70008000000000000000')::uuid, case when n %% 20000 = 0 then 'rare' else 'flow' end,
    case when n %% 100 = 0 then 'RUNNING' else 'COMPLETED' end, 'fail', 1, now() - interval '1 d',
    case when n %% 100 > 0 then now() - interval '1 d' end, case when n %% 1000 = 1 then %(starter)s::uuid end
from generate_series(1, %(rows)s) n
"""


@pytest.fixture(scope="module")
def stored(database_url: str) -> Iterator[StoreHarness]:
    target = Target.parse(database_url, schema=f"test_pages_{uuid4().hex[:8]}")
    with target.connect("everbeat test") as connection:
        migrating.migrate(connection, target)
        db = StoreHarness(target, connection)
        connection.execute(db.plain(FILL), {"rows": ROWS, "starter": STARTER})
        connection.execute(db.plain("vacuum analyze {schema}.workflows"))
        yield db
        connection.execute(db.plain("drop schema {schema} cascade"))
        db.database.close()


def id_of(number: int) -> UUID:
    return UUID(f"{number:012x}70008000000000000000")


def pages(db: StoreHarness, statement: Statement[Any]) -> int:
    return pages_of(plan(db, statement), statement, tables=["workflows"])


@pytest.mark.parametrize("first", [ROWS, ROWS // 2, 2_000])
def test_each_page_of_the_list_reads_few_pages_of_the_database(stored: StoreHarness, first: int) -> None:
    before = None if first == ROWS else id_of(first + 1)
    page = control.listing(control.WorkflowQuery(before=before), limit=50)
    assert [each.id for each in stored.run(page)] == [id_of(n) for n in range(first, first - 50, -1)]
    assert pages(stored, page) < 200
    for filters in ({"state": "RUNNING"}, {"parent": STARTER}, {"name": "rare"}, {"state": "FAILED"}):
        query = control.WorkflowQuery(before=before, **filters)  # type: ignore[arg-type]
        taken = pages(stored, control.listing(query, limit=50, most=EXAMINED))
        last = pages(stored, control.last_examined(query, most=EXAMINED))
        print(f"{filters} below {first:,}: {taken} and {last} pages")
        assert max(taken, last) < 2_000


def test_a_search_that_stops_early_continues_where_it_stopped_and_misses_none(stored: StoreHarness) -> None:
    app = App(stored.target.url, schema=stored.target.schema, auto_migrate=False)
    found: list[UUID] = []
    before: UUID | None = None
    calls = 0
    while True:
        plan_of_page = workflow_page(name="rare", before=before, limit=2, most=EXAMINED)
        page = database_of(app).run(plan_of_page, name="search", twin="asearch")
        found += [each.id for each in page]
        calls += 1
        assert page.examined in (None, EXAMINED)
        if len(page) < 2 and page.continue_before is None:
            break
        before = page[-1].id if len(page) == 2 else page.continue_before
    app.close()
    assert found == [id_of(n) for n in range(ROWS, 0, -20_000)]
    assert calls >= ROWS // EXAMINED - 3
