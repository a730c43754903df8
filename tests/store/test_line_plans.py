"""Claims, sends and the statements about lines cost the same with 100 and with 100,000 waiting keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from everbeat.store import claims, lines, tasks
from everbeat.store.session import KEYED
from everbeat.store.statement import Statement, compose
from tests.store.conftest import StoreHarness
from tests.store.lining import put_limit, send
from tests.store.plans import filled

pytestmark = pytest.mark.timeout(600)  # 500,000 rows take minutes

KEYS = 100_000
MOST_OVER = 1.25
DEEPER = 120
"""The pages that a claim of ten reads more because the indexes of 100,000 rows are deeper than those of 100."""
TABLES = ("tasks", "lines", "gates", "line_changes")
NAMES = ("serial", "twice", "parked", "tomorrow")

# The name of the tasks, their serial key, their gates, and when they are due.
KINDS = (
    ("serial", "'key:' || n", "null::text[]", "0"),
    ("twice", "null", "array['wide', 'tenant/' || n]", "0"),
    ("parked", "null", "array['full', 'tenant/' || n]", "0"),
    (
        "foreign",
        "case when n %% 2 = 0 then 'key:f' || n end",
        "case when n %% 2 = 1 then array['wide', 'tenant/' || n] end",
        "0",
    ),
    (
        "tomorrow",
        "case when n %% 2 = 0 then 'key:t' || n end",
        "case when n %% 2 = 1 then array['wide', 'tenant/' || n] end",
        "1 day",
    ),
)
FILL = """
insert into {{schema}}.tasks (id, name, queue, priority, args, serial, gates, sent_at, enqueued_at, serial_at)
select gen_random_uuid(), '{name}', 'default', 0, '{{{{}}}}', s.serial, s.gates, now(), now() + interval '{delay}',
    case when s.serial is not null then now() + interval '{delay}' end
from (select {serial} as serial, {gates} as gates from generate_series(1, %(keys)s) n) s
"""


# The result of applying all changes. Applying them in pages of 2,000 would take minutes.
APPLIED = (
    """insert into {schema}.lines (line, is_strict, state, reader, queue, priority, name, gates, at, turn, blocked, floor)
       select serial, not starts_with(serial, 'limit:'), case name when 'parked' then 'B' when 'tomorrow' then 'W' else 'R' end, name, queue,
           priority, name, gates, enqueued_at, now(), case when name = 'parked' then 'full' end,
           case when starts_with(serial, 'limit:') then serial_at else '-infinity' end
       from {schema}.tasks where serial is not null and state = 'PENDING'""",
    """insert into {schema}.gates (gate, limit_name, version)
       select distinct g, m.name, m.version
       from {schema}.tasks cross join unnest(gates) g join {schema}.limits m on m.name = split_part(g, '/', 1)
       on conflict do nothing""",
    "delete from {schema}.line_changes",
)


class Keyed:
    """A schema in which this many keys of each kind wait. The lines of the tasks named "parked" wait at a full gate."""

    def __init__(self, db: StoreHarness, keys: int) -> None:
        self.db = db
        put_limit(db, "full", concurrency=1)
        put_limit(db, "wide", concurrency=1_000_000)
        put_limit(db, "tenant", concurrency=3)
        send(db, "full", name="holder")
        self.run(self.apply(most=10))
        assert len(self.run(self.claim("holder"))) == 1
        for name, serial, gates, delay in KINDS:
            text = FILL.format(name=name, serial=serial, gates=gates, delay=delay)
            db.connection.execute(db.plain(text), {"keys": keys})
        for text in APPLIED:
            db.connection.execute(db.plain(text))
        for table in TABLES:
            db.connection.execute(db.plain(f"vacuum analyze {{schema}}.{table}"))

    def run(self, statement: Statement[Any]) -> Any:
        return self.db.run(statement)

    @staticmethod
    def claim(*names: str, starts: int = 10) -> Statement[Any]:
        return claims.claim(
            worker_id="w1",
            claim_call=uuid4(),
            names=names,
            limit=10,
            queues=None,
            queue_priorities={},
            starts=starts,
            channel="c",
        )

    @staticmethod
    def apply(*, most: int = lines.MOST_CHANGES) -> Statement[Any]:
        return lines.apply_changes(readers=NAMES, queues=None, channel=None, most=most)

    def pages(self, statement: Statement[Any], *before: str) -> tuple[int, int]:
        """Return the pages and the rows of an execution on a warm session. Its changes are rolled back. Fail if it scans a table."""
        text = b"explain (analyze, buffers, format json) " + compose(statement.name, self.db.target.schema)
        fewest, rows = 10**9, 0
        for _ in range(3):
            with self.db.connection.transaction(force_rollback=True):
                self.db.connection.execute(KEYED.replace(b"set ", b"set local "))
                for query in before:
                    self.db.connection.execute(self.db.plain(query))
                scanned = self.scans()
                row = self.db.connection.execute(text, statement.parameters).fetchone()
                assert self.scans() == scanned, "a table was read from its beginning"
            assert row is not None
            plan = row[0][0]["Plan"]
            fewest, rows = (
                min(fewest, plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]),
                plan["Actual Rows"],
            )
        return fewest, int(rows)

    def server_ms(self, statement: Statement[Any]) -> float:
        """Return how long the server executes a statement, in milliseconds. Its changes are rolled back."""
        text = b"explain (analyze, format json) " + compose(statement.name, self.db.target.schema)
        with self.db.connection.transaction(force_rollback=True):
            self.db.connection.execute(KEYED.replace(b"set ", b"set local "))
            row = self.db.connection.execute(text, statement.parameters).fetchone()
        assert row is not None
        return float(row[0][0]["Execution Time"])

    def scans(self) -> list[Any]:
        """Return how often this transaction has scanned each of the tables."""
        return self.db.connection.execute(
            "select relname, seq_scan from pg_stat_xact_user_tables where schemaname = %s and relname = any(%s) order by relname",
            [self.db.target.schema, list(TABLES)],
        ).fetchall()


@contextmanager
def keyed(database_url: str, keys: int) -> Iterator[Keyed]:
    with filled(database_url, rows=1000, in_flight=10) as db:
        yield Keyed(db, keys)


@pytest.fixture(scope="module", params=[KEYS // 10, pytest.param(KEYS, marks=pytest.mark.long)])
def many(database_url: str, request: pytest.FixtureRequest) -> Iterator[Keyed]:
    with keyed(database_url, request.param) as db:
        yield db


@pytest.fixture(scope="module")
def few(database_url: str) -> Iterator[Keyed]:
    with keyed(database_url, 100) as db:
        yield db


def compare(few: Keyed, many: Keyed, statement: Statement[Any], *before: str) -> int:
    """Compare the pages that a statement reads, and return its rows."""
    (small, rows), (large, rows_of_many) = few.pages(statement, *before), many.pages(statement, *before)
    print(f"{statement.name}: {small} pages with 100 keys, {large} with many, {rows} rows")
    assert rows == rows_of_many
    assert large <= MOST_OVER * small + DEEPER
    return rows


@pytest.mark.parametrize("names", [(name,) for name in NAMES] + [NAMES], ids=" ".join)
def test_a_claim_of_ten_reads_the_same_pages_with_many_keys(
    few: Keyed, many: Keyed, names: tuple[str, ...]
) -> None:  # K9
    rows = compare(few, many, Keyed.claim(*names))
    assert rows == (0 if names[0] in ("parked", "tomorrow") and len(names) == 1 else 10)


@pytest.mark.long  # it measures time: the quick tests compare pages
@pytest.mark.parametrize("name", ["serial", "twice"])
def test_a_claim_of_ten_takes_about_as_long_with_many_keys(few: Keyed, many: Keyed, name: str) -> None:  # K9
    """The claims alternate, so that a busy machine slows down both."""
    small, large = list[float](), list[float]()
    for _ in range(230):
        small.append(few.server_ms(Keyed.claim(name)))
        large.append(many.server_ms(Keyed.claim(name)))
    ratio = median(large[30:]) / median(small[30:])
    print(
        f"{name}: {median(small[30:]):.2f} ms with 100 keys, {median(large[30:]):.2f} ms with many: {ratio:.2f}"
    )
    assert ratio <= MOST_OVER


def test_a_claim_ahead_of_a_slot_reads_no_lines_with_limits(few: Keyed, many: Keyed) -> None:  # K9
    assert compare(few, many, Keyed.claim("twice", starts=0)) == 0


SEND_ONE = """
insert into {schema}.tasks (id, name, queue, args, gates) select gen_random_uuid(), 'twice', 'default', '{{}}', array['wide', 'tenant/1']
"""
END_ONE = "update {schema}.tasks set state = 'COMPLETED', claim_id = null, claim_call = null where name = 'holder' and state = 'RUNNING'"


@pytest.mark.parametrize(
    "before", [(SEND_ONE,), (END_ONE,), (SEND_ONE, END_ONE), ()], ids=["sent", "ended", "both", "nothing"]
)
def test_applied_changes_read_the_same_pages_with_many_keys(
    few: Keyed, many: Keyed, before: tuple[str, ...]
) -> None:  # K9
    assert compare(few, many, Keyed.apply(), *before) == 1


@pytest.mark.parametrize("names", [(name,) for name in NAMES] + [NAMES], ids=" ".join)
def test_the_next_due_time_reads_the_same_pages_with_many_keys(
    few: Keyed, many: Keyed, names: tuple[str, ...]
) -> None:  # K9
    assert compare(few, many, tasks.next_due(names=names, queues=None)) == 1


def test_a_send_reads_the_same_pages_with_many_keys(few: Keyed, many: Keyed) -> None:  # K9
    task = tasks.NewTask(id=uuid4(), name="serial", queue="default", priority=0, args=b"{}", serial="key:7")
    assert compare(few, many, tasks.insert_task(task, channel="c")) == 1


def test_a_send_in_an_open_transaction_delays_no_other_send_or_claim(db: StoreHarness) -> None:  # K9
    put_limit(db, "tenant", concurrency=5)
    with db.target.connect("everbeat sender") as sender, db.target.connect("everbeat other") as other:
        other.execute("set statement_timeout = '3s'")
        with sender.transaction(force_rollback=True):
            for serial in (None, "key:a"):
                sender.execute(
                    db.plain(
                        "insert into {schema}.tasks (id, name, queue, args, gates, serial, serial_at)"
                        " select gen_random_uuid(), 'work', 'default', '{{}}', array['tenant/1'], %(serial)s,"
                        " case when %(serial)s::text is not null then now() end"
                    ),
                    {"serial": serial},
                )
            sent = []
            for serial in (None, "key:a"):
                sent += send_through(db, other, serial)
            claim = Keyed.claim("work")
            other.execute(compose("line/apply_changes", db.target.schema), Keyed.apply().parameters)
            taken = claim.read(
                other.execute(compose(claim.name, db.target.schema), claim.parameters).fetchall()
            )
            assert {one.id for one in taken} == set(sent)


def send_through(db: StoreHarness, connection: psycopg.Connection[Any], serial: str | None) -> list[Any]:
    """Send a task of tenant/1 through this connection."""
    found = connection.execute(
        db.plain(
            "insert into {schema}.tasks (id, name, queue, args, gates, serial, serial_at)"
            " values (gen_random_uuid(), 'work', 'default', '{{}}', array['tenant/1'], %(serial)s,"
            " case when %(serial)s::text is not null then now() end) returning id"
        ),
        {"serial": serial},
    ).fetchall()
    return [row[0] for row in found]
