"""Fills a schema with the rows of a large installation: live and ended tasks, and 30 days of everything that the pages show."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from msgspec import Struct
from psycopg import Connection
from psycopg.types.numeric import Int8

from everbeat.store import history, series
from tests.store.conftest import StoreHarness
from tests.store.lining import put_limit

DAYS: Final = 30
TREES: Final = 25
"""Each has four workers."""
LONG: Final = "n" * 200
"""The longest name. One queue, one task function, one schedule and one workflow have it."""


class Sizes(Struct, frozen=True, kw_only=True):
    """How many rows of each kind there are. `rows` is the number of tasks, of which `in_history` have been moved."""

    rows: int
    due: int
    scheduled: int
    running: int
    ended: int
    keys: int
    series: int

    @classmethod
    def of(cls, rows: int) -> Sizes:
        """Return the sizes for this many tasks. `series` is the number of rows of each other table that grows with time."""
        return cls(
            rows=rows,
            due=rows // 10,
            scheduled=rows // 100,
            running=min(1_000, rows // 100),
            ended=rows // 50,
            keys=min(100_000, rows // 10),
            series=max(10_000, min(500_000, rows // 20)),
        )

    @property
    def in_history(self) -> int:
        return self.rows - self.due - self.scheduled - self.running - self.ended - self.keys


# An id as clients make it: its first 48 bits are the milliseconds of the time.
_ID = (
    "(lpad(to_hex((extract(epoch from {at}) * 1000)::bigint), 12, '0') || '7' || substr(md5({seed}), 1, 3)"
    " || '8' || substr(md5({seed}), 4, 15))::uuid"
)
_QUEUE = "case when n %% 7 = 0 then 'queue-' || n %% 200 when n %% 1000 = 1 then %(long)s else 'queue-' || n %% 5 end"
_NAME = "case when n %% 1000 = 2 then %(long)s else 'shop.task_' || n %% 40 end"
_ERROR = (
    """'{{"code": "UNHANDLED_EXCEPTION", "type": "shop.Refused' || n %% 7 || '", "message": "the bank said no", "traceback": "' """
    """|| repeat('line ', 60) || '"}}'"""
)
_ARGS = """('{{"customer": ' || n || ', "kind": "invoice", "note": "' || md5(n::text) || '"}}')"""
_LABELS = "case when n %% 10 = 0 then jsonb_build_object('env', 'prod', 'tenant', (n %% 5000)::text) end"

LIVE = f"""
insert into {{schema}}.tasks (id, name, queue, priority, state, args, sent_at, enqueued_at, labels, next_retry_at, wake_at, waits_for, attempt, fence)
select {_ID.format(at="s.at", seed="'live' || n")}, {_NAME}, {_QUEUE}, n %% 3, 'PENDING', {_ARGS}::json, s.at,
    case when n <= %(due)s then s.at else now() + n %% 86400 * interval '1 s' end, {_LABELS},
    case when n %% 97 = 0 then s.at end, case when n %% 89 = 0 and n > %(due)s then now() + n %% 86400 * interval '1 s' end,
    case when n <= %(due)s and n %% 1009 = 0 then 'answer/refund' end,
    case when n %% 97 = 0 then 1 else 0 end, case when n %% 97 = 0 then 1 else 0 end
from generate_series(1, %(due)s + %(scheduled)s) n
cross join lateral (select now() - interval '6 h' + n * (interval '6 h' / (%(due)s + %(scheduled)s)) as at) s
"""
RUNNING = f"""
insert into {{schema}}.tasks (id, name, queue, state, args, sent_at, enqueued_at, claim_id, claim_call, permit, claimed_at, claimed_by_worker_id,
    started_at, fence, attempt, gates, labels)
select {_ID.format(at="s.at", seed="'held' || n")}, {_NAME}, {_QUEUE}, 'RUNNING', {_ARGS}::json, s.at, s.at, md5(n::text)::uuid, md5(n::text)::uuid,
    case when n %% 10 = 0 then md5(n::text)::uuid end, s.at, 'worker-' || n %% 25 || '-' || n %% 4, s.at, 1, 1,
    case when n %% 10 = 0 then array['tenant/' || n] end, {_LABELS}
from generate_series(1, %(running)s) n
cross join lateral (select now() - interval '60 s' + n * (interval '60 s' / %(running)s) as at) s
"""
ENDED = f"""
insert into {{schema}}.tasks (id, name, queue, state, args, sent_at, enqueued_at, claimed_at, claimed_by_worker_id, started_at, fence, attempt,
    completed_at, failed_at, cancelled_at, expired_at, result, error, labels, batch_id, parent_id)
select {_ID.format(at="s.at", seed="'ended' || n")}, {_NAME}, {_QUEUE}, s.state, {_ARGS}::json, s.at, s.at, s.at,
    'worker-' || n %% 25 || '-' || n %% 4, s.at, 1, 1, case when s.state = 'COMPLETED' then s.over end, case when s.state = 'FAILED' then s.over end,
    case when s.state = 'CANCELLED' then s.over end, case when s.state = 'EXPIRED' then s.over end,
    case when s.state = 'COMPLETED' then '{{{{"total": 1}}}}'::json end, case when s.state = 'FAILED' then ({_ERROR})::json end, {_LABELS},
    case when n %% 100 = 0 then md5('batch' || n %% 1000)::uuid end, case when n %% 1000 = 0 then md5('parent')::uuid end
from generate_series(1, %(ended)s) n
cross join lateral (
    select now() - interval '2 h' + n * (interval '2 h' / %(ended)s) as at,
        now() - interval '2 h' + n * (interval '2 h' / %(ended)s) + interval '3 s' as over,
        case when n %% 50 = 0 then 'FAILED' when n %% 501 = 0 then 'CANCELLED' when n %% 503 = 0 then 'EXPIRED' else 'COMPLETED' end as state
) s
"""
ATTEMPTS = """
insert into {schema}.attempts (task_id, attempt, claim_id, fence, worker_id, claimed_at, started_at, ended_at, outcome, will_retry, error)
select t.id, 1, md5(t.id::text)::uuid, 1, coalesce(t.claimed_by_worker_id, 'worker-1-1'), t.sent_at, t.sent_at, t.sent_at + interval '3 s',
    case when t.state in ('FAILED', 'PENDING') then 'FAILED' else 'COMPLETED' end, t.state = 'PENDING', t.error
from {schema}.tasks t where t.attempt > 0 and t.state <> 'RUNNING' and t.state <> 'EXPIRED'
"""
HISTORY = f"""
insert into {{schema}}.history (id, name, queue, priority, state, args, policy, sent_at, enqueued_at, fence, attempt, counted_from, retry_count,
    crash_count, loss_count, claimed_at, claimed_by_worker_id, started_at, completed_at, failed_at, cancelled_at, expired_at, result, error, suspect,
    alone, checkpoint_number, ended_at, labels, batch_id, workflow_id, attempts, recoveries)
select x.id, {_NAME}, {_QUEUE}, 0, x.state, {_ARGS}::json, '{{{{}}}}', x.at, x.at, 1, 1, 0, 0, 0, 0, x.at,
    'worker-' || n %% 25 || '-' || n %% 4, x.at, case when x.state = 'COMPLETED' then x.over end, case when x.state = 'FAILED' then x.over end,
    case when x.state = 'CANCELLED' then x.over end, case when x.state = 'EXPIRED' then x.over end,
    case when x.state = 'COMPLETED' then '{{{{"total": 12345.67}}}}'::json end, case when x.state = 'FAILED' then ({_ERROR})::json end,
    false, false, 0, x.over, {_LABELS}, case when n %% 100 = 0 then md5('batch' || n %% 1000)::uuid end, null,
    array[row(x.id, 1, md5(n::text)::uuid, 1, 'worker-' || n %% 25 || '-' || n %% 4, x.at, x.at, x.over,
        case when x.state = 'FAILED' then 'FAILED' else 'COMPLETED' end, false, null)::{{schema}}.history_attempt],
    case when n %% 2000 = 0 then array[row(-n - %(day)s * 10000000, x.id, 'shop.task_' || n %% 40, 'queue-' || n %% 5, 1, md5(n::text)::uuid, 1,
        'worker-' || n %% 25 || '-' || n %% 4, 'tree-' || n %% 25, 'host', 1, 'RUNNING', 'killed by SIGKILL', 'child_exit', x.at, x.over, 10, 'retry',
        null, 'tree-1', null, null, false, null, null)::{{schema}}.history_recovery] end
from generate_series(1, %(of_day)s) n
cross join lateral (select %(since)s::timestamptz + n * (interval '23 h' / %(of_day)s) as at) a
cross join lateral (
    select a.at, a.at + interval '3 s' as over, {_ID.format(at="a.at", seed="n::text || %(since)s::text")} as id,
        case when n %% 100 = 0 then 'FAILED' when n %% 501 = 0 then 'CANCELLED' when n %% 503 = 0 then 'EXPIRED' else 'COMPLETED' end as state
) x
"""
LABELS_OF_TASKS = """
insert into {schema}.labels (key, value, id)
select l.key, l.value, t.id from {schema}.all_tasks t cross join lateral jsonb_each_text(t.labels) l where t.labels is not null
on conflict do nothing
"""
# Tasks that wait for keys of a limit: each has its own line, which the claim has put behind the full gate of its tenant.
KEYED = f"""
insert into {{schema}}.tasks (id, name, queue, args, serial, serial_at, gates, sent_at, enqueued_at)
select {_ID.format(at="s.at", seed="'keyed' || n")}, 'shop.keyed', 'queue-1', {_ARGS}::json, s.line, s.at, array[substr(s.line, 7)], s.at, s.at
from generate_series(1, %(keys)s) n
cross join lateral (
    select now() - interval '1 h' + n * interval '1 ms' as at,
        'limit:' || case when n %% 50 = 0 then 'limit-' || n / 50 %% 40 else 'tenant' end || '/' || n as line
) s
"""
LINES = """
insert into {schema}.lines (line, is_strict, state, reader, queue, priority, name, gates, at, turn, blocked, floor)
select serial, false, 'R', name, queue, priority, name, gates, enqueued_at, now(), null, serial_at
from {schema}.tasks where serial is not null and state = 'PENDING'
"""
GATES = """
insert into {schema}.gates (gate, limit_name, version)
select distinct g, m.name, m.version
from {schema}.tasks t cross join unnest(t.gates) g join {schema}.limits m on m.name = split_part(g, '/', 1)
on conflict do nothing
"""
TREES_ROWS = """
insert into {schema}.supervisors (id, hostname, pid, lock_key, session_name, beat_seq, last_beat_at, started_at, ended_at, ended_how, slot)
select 'tree-' || n, case when n = 2 then %(long)s else 'host-' || n end, n, n, 'tree-' || n, 100,
    case when n < %(trees)s then now() else now() - n * interval '1 minute' end,
    case when n < %(trees)s then now() - interval '1 day' else now() - n * interval '1 minute' - %(trees)s * interval '1 minute' end,
    case when n >= %(trees)s then now() - n * interval '1 minute' end,
    case when n >= %(trees)s then case when n %% 10 = 0 then 'session' else 'farewell' end end, null
from generate_series(0, 2000) n
"""
WORKERS_ROWS = """
insert into {schema}.workers (id, supervisor_id, hostname, pid, queues, beat_seq, last_beat_at, started_at, ended_at, ended_how)
select 'worker-' || n || '-' || k, 'tree-' || n, 'host-' || n, k, case when n %% 2 = 0 then array['queue-' || n, %(long)s] end, 100, now(),
    case when n < %(trees)s then now() - interval '1 day' else now() - n * interval '1 minute' - %(trees)s * interval '1 minute' end,
    case when n >= %(trees)s then now() - n * interval '1 minute' end,
    case when n >= %(trees)s then case when n %% 10 = 0 then 'session' else 'farewell' end end
from generate_series(0, 2000) n cross join generate_series(0, 3) k
"""
BEATS = """
insert into {schema}.beats (supervisor_id, seq, sent_at, held)
select 'tree-' || n %% 25, 3000 - n / 25, now() - n / 25 * interval '30 s' - n %% 25 * interval '1 s', 40
from generate_series(0, least(%(series)s, 72000)) n
"""
STATES = """
insert into {schema}.worker_states (id, worker_id, at, tasks_running, tasks_claimed, slots, rss_bytes, cpu_percent, loop_lag_ms)
overriding system value
select n, 'worker-' || n %% 25 || '-' || n %% 4, now() - n * (interval '7 days' / %(series)s), 10, 10, 20, 100000000, 50, 1
from generate_series(1, %(series)s) n
"""
RECOVERIES = """
insert into {schema}.recoveries (task_id, name, queue, fence, claim_id, attempt, worker_id, supervisor_id, hostname, pid, was, cause, noticed_by,
    last_beat_at, noticed_at, noticed_after_ms, action, recovered_by)
select t.id, t.name, t.queue, 1, md5(t.id::text)::uuid, 1, 'worker-' || 25 + n / 50 || '-1', 'tree-' || 25 + n / 50, 'host', 1, 'RUNNING',
    'killed by SIGKILL', 'session', t.sent_at, t.sent_at + interval '2 s', 2000, 'retry', 'tree-1'
from (select t.*, row_number() over (order by t.id) as n from {schema}.tasks t where t.completed_at is not null order by t.id limit 3000) t
"""
OLD_RECOVERIES = """
insert into {schema}.recoveries (task_id, name, queue, fence, claim_id, attempt, worker_id, supervisor_id, hostname, pid, was, cause, noticed_by,
    noticed_at, noticed_after_ms, action, recovered_by)
select md5(n::text)::uuid, 'shop.task_1', 'queue-1', 1, md5(n::text)::uuid, 1,
    'worker-' || n %% 2000 || '-1', 'tree-' || n %% 2000, 'host', 1, 'RUNNING',
    'killed by SIGKILL', 'session', now() - interval '30 days' + n * (interval '290 days' / %(series)s), 2000, 'retry', 'tree-1'
from generate_series(1, %(series)s / 10) n
"""
RATES = """
insert into {schema}.rates (seconds, at, queue, name, supervisor, started, completed, waits, runs)
select kind.seconds, date_bin(kind.seconds * interval '1 s', now(), timestamptz '2000-01-01 00:00+00') - n * kind.seconds * interval '1 s',
    'queue-' || q, 'shop.task_' || k, '', 10, 10, array_fill(1::bigint, array[24]), array_fill(1::bigint, array[24])
from (values (60, %(series)s / 100), (3600, least(%(series)s / 100, 720))) kind (seconds, samples)
cross join lateral generate_series(0, least(kind.samples, 2880)) n cross join generate_series(0, 4) q cross join generate_series(0, 19) k
"""
# The other queues have one task function each. Their rates of most minutes are left out, because they are summed already.
RATES_OF_MANY = """
insert into {schema}.rates (seconds, at, queue, name, supervisor, started, completed, waits, runs)
select kind.seconds, date_bin(kind.seconds * interval '1 s', now(), timestamptz '2000-01-01 00:00+00') - n * kind.seconds * interval '1 s',
    'queue-' || q, 'shop.task_' || q %% 40, '', 10, 10, array_fill(1::bigint, array[24]), array_fill(1::bigint, array[24])
from (values (60, 10, %(series)s / 100), (3600, 1, least(%(series)s / 100, 720))) kind (seconds, step, samples)
cross join lateral generate_series(10, least(kind.samples, 2880), kind.step) n cross join generate_series(5, 199) q
"""
# In the last minutes, each tree has run tasks of each queue.
RATES_BY_TREE = """
insert into {schema}.rates (seconds, at, queue, name, supervisor, started, completed, waits, runs)
select 60, date_bin('1 min', now(), timestamptz '2000-01-01 00:00+00') - n * interval '1 min', 'queue-' || q, 'shop.task_' || q %% 40, 'tree-' || s,
    10, 10, array_fill(1::bigint, array[24]), array_fill(1::bigint, array[24])
from generate_series(0, 10) n cross join generate_series(0, 199) q
cross join generate_series(1, least(%(trees)s, 1 + %(series)s / 10000)) s
"""
DEPTHS = """
insert into {schema}.depths (seconds, at, queue, due, scheduled, suspended, claimed, running, oldest_due_s, at_least)
select kind.seconds, date_bin(kind.seconds * interval '1 s', now(), timestamptz '2000-01-01 00:00+00') - n * kind.seconds * interval '1 s',
    'queue-' || q, 100, 10, 1, 2, 3, 5, '{{}}'
from (values (10, 720), (60, 2880), (3600, 720)) kind (seconds, samples)
cross join lateral generate_series(0, least(kind.samples, %(series)s / 200)) n cross join generate_series(0, 199) q
"""
AUDIT = """
insert into {schema}.audit_log (at, actor, origin, action, target, affected, outcome)
select now() - n * (interval '30 days' / %(series)s), case when n %% 100 = 0 then %(long)s else 'user-' || n %% 20 end, 'web', 'cancel',
    md5(n::text)::uuid::text, 1, 'CANCELLED'
from generate_series(%(series)s, 1, -1) n
"""
ACTIONS = """
insert into {schema}.bulk_actions (id, action, filters, parameters, digest, state, requested_by, origin, requested_at, started_at, ended_at)
select md5('action' || n)::uuid, 'retry', '{{"state": ["FAILED"]}}', '{{}}', md5(n::text), 'COMPLETED', 'ann', 'web', now() - n * interval '1 hour',
    now() - n * interval '1 hour', now() - n * interval '1 hour' + interval '1 minute'
from generate_series(1, 700) n
"""
SCHEDULES = """
insert into {schema}.schedules (name, task, args, queue, priority, timing, timezone, missed, most, catchup_ms, overlap, jitter_ms, next_at)
select case when n = 1 then %(long)s else 'schedule-' || n end, 'shop.task_' || n %% 40, '{{}}', 'queue-1', 0, '{{"every_ms":60000}}', 'UTC',
    'latest', 100, 86400000, 'allow', 0, now() + n * interval '1 second' from generate_series(1, 500) n
"""
TICKS = """
insert into {schema}.ticks (schedule, at, outcome, task_id)
select 'schedule-' || 2 + n %% 50, now() - n / 50 * interval '1 minute', 'SENT', md5(n::text)::uuid from generate_series(1, %(series)s) n
"""
WORKFLOWS = f"""
insert into {{schema}}.workflows (id, name, state, on_error, node_count, sent_at, ended_at, labels)
select {_ID.format(at="s.at", seed="'flow' || n")}, case when n %% 100 = 0 then %(long)s else 'order_' || n %% 10 end,
    case when n > %(flows)s - 100 then 'RUNNING' when n %% 50 = 0 then 'FAILED' else 'COMPLETED' end, 'fail', 3, s.at,
    case when n <= %(flows)s - 100 then s.at + interval '1 minute' end, {_LABELS}
from generate_series(1, %(flows)s) n
cross join lateral (select now() - interval '30 days' + n * (interval '30 days' / %(flows)s) as at) s
"""
NODES = """
insert into {schema}.nodes (workflow_id, number, name, kind, state, task_id, task, queue, enqueued_at, ended_at)
select w.id, k, case when k = 2 then %(long)s else 'step' || k end, 'task',
    case when w.state = 'RUNNING' then case when k = 0 then 'COMPLETED' else 'PENDING' end else 'COMPLETED' end,
    case when w.state <> 'RUNNING' or k = 0 then md5(w.id::text || k)::uuid end, 'shop.task_' || k, 'queue-1', w.sent_at,
    case when w.state <> 'RUNNING' or k = 0 then w.sent_at + interval '1 s' end
from {schema}.workflows w cross join generate_series(0, 2) k
"""
LABELS_OF_WORKFLOWS = """
insert into {schema}.labels (key, value, id)
select l.key, l.value, w.id from {schema}.workflows w cross join lateral jsonb_each_text(w.labels) l where w.labels is not null
"""
BATCHES = """
insert into {schema}.batches (id, name, total, completed, created_at, sealed_at, ended_at)
select md5('batch' || n * 100)::uuid, 'import', 100, 100, now(), now(), now() from generate_series(0, 9) n
"""
STEPS = """
insert into {schema}.steps (task_id, kind, name, result, attempt)
select t.id, 'step', 'step-' || k, '1', 1
from (select x.id from {schema}.tasks x where x.completed_at is not null order by x.id limit %(series)s / 5) t cross join generate_series(1, 5) k
"""
SIGNALS = """
insert into {schema}.signals (id, target, name, value)
select gen_random_uuid(), t.id, 'approved', 'true' from {schema}.tasks t where t.completed_at is not null order by t.id limit %(series)s
"""
ITEMS = """
insert into {schema}.stream_items (task_id, name, number, attempt, value)
select t.id, 'progress', k, 1, '1'
from (select x.id from {schema}.tasks x where x.completed_at is not null order by x.id limit %(series)s / 5) t cross join generate_series(1, 5) k
"""
EDGES = """
insert into {schema}.edges (workflow_id, parent, child, state)
select n.workflow_id, n.number - 1, n.number, case when n.state = 'PENDING' then 'OPEN' else 'MET' end from {schema}.nodes n where n.number > 0
"""
QUESTIONS = """
insert into {schema}.steps (task_id, kind, name, state, result, attempt)
select t.id, 'event', 'answer/refund', 'OPEN', '{{"question": "Refund it?", "type": {{"kind": "bool"}}, "note": null}}', 1
from {schema}.tasks t where t.state = 'PENDING' and starts_with(t.waits_for, 'answer/')
"""
PAUSES = """
insert into {schema}.pauses (kind, name, paused_by, reason)
select 'queue', 'queue-' || 100 + n, 'ann', 'maintenance' from generate_series(1, 20) n
"""

_TEXTS: Final = (
    LIVE, RUNNING, ENDED, KEYED, LINES, GATES, ATTEMPTS, TREES_ROWS, WORKERS_ROWS, BEATS, STATES, OLD_RECOVERIES, RECOVERIES, RATES,
    RATES_OF_MANY, RATES_BY_TREE, DEPTHS, AUDIT, ACTIONS, SCHEDULES, TICKS, WORKFLOWS, NODES, EDGES, STEPS, SIGNALS, ITEMS, LABELS_OF_WORKFLOWS,
    LABELS_OF_TASKS, BATCHES, QUESTIONS, PAUSES,
)  # fmt: skip


def fill(db: StoreHarness, sizes: Sizes) -> None:
    """Insert all rows, without the triggers that a sender or worker would fire, and analyze the tables."""
    given = {
        "long": LONG,
        "trees": Int8(TREES),
        "flows": Int8(max(1_000, sizes.rows // 100)),
        **{name: Int8(getattr(sizes, name)) for name in sizes.__struct_fields__},
    }
    put_limit(db, "tenant", concurrency=1)
    for number in range(40):
        put_limit(db, f"limit-{number}", concurrency=number + 1)
    today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    days = [today - timedelta(days=day) for day in range(1, DAYS + 1)]
    for since in days:
        assert db.run(history.add_part(since, unit="day"))

    def run(connection: Connection[Any], texts: tuple[str, ...], **more: Any) -> None:
        connection.execute("set session_replication_role = replica; set synchronous_commit = off")
        for text in texts:
            connection.execute(db.plain(text), {**given, **more})
        connection.execute("reset session_replication_role; reset synchronous_commit")

    def add_day(since: datetime, day: int) -> None:
        with db.target.connect("everbeat filler") as connection:
            run(connection, (HISTORY,), since=since, day=Int8(day), of_day=Int8(sizes.in_history // DAYS))

    with ThreadPoolExecutor(2) as threads:
        parts = [threads.submit(add_day, since, day) for day, since in enumerate(reversed(days))]
        for part in parts:
            part.result()
    run(db.connection, _TEXTS)
    db.run(series.sum_minutes())
    for step in (series.sum_rates, series.add_peaks):
        while db.run(step()):
            pass
    tables = db.connection.execute(
        "select relname from pg_class where relnamespace = %s::regnamespace and relkind = 'r'",
        [db.target.schema],
    ).fetchall()
    for (table,) in tables:
        db.connection.execute(db.plain(f"vacuum analyze {{schema}}.{table}"))
    db.connection.execute(db.plain("analyze {schema}.history"))
