"""The safety invariants of the protocol as queries: each must find no row. The audit is a trigger that only tests install."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

import psycopg
from psycopg import Connection, sql

from everbeat.domain.task.states import TRANSITIONS

AUDIT = """
create table {schema}.audit (
    seq bigserial primary key, task_id uuid, old text, new text, fence bigint, claim_id uuid, attempt integer,
    cancel_requested boolean, at timestamptz default clock_timestamp(), xid xid8 default pg_current_xact_id(),
    seen pg_snapshot default pg_current_snapshot()
);
create index audit_by_task on {schema}.audit (task_id, seq);
create table {schema}.limit_audit (
    seq bigserial primary key, name text, concurrency integer, starts integer, period_s double precision, burst integer, sliding boolean
);
create function {schema}.audit_task() returns trigger language plpgsql as $$
begin
    if tg_op = 'INSERT' and new.state in ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED')
        and new.state = (select a.new from {schema}.audit a where a.task_id = new.id order by a.seq desc limit 1) then
        return null;  -- it came back from the history as it was
    elsif tg_op = 'INSERT' then
        insert into {schema}.audit (task_id, old, new, fence, claim_id, attempt)
        values (new.id, null, new.state, new.fence, new.claim_id, new.attempt);
    elsif old.state is distinct from new.state or old.fence <> new.fence or old.claim_id is distinct from new.claim_id then
        insert into {schema}.audit (task_id, old, new, fence, claim_id, attempt, cancel_requested)
        values (new.id, old.state, new.state, new.fence, new.claim_id, new.attempt, old.cancel_requested_at is not null);
    end if;
    return null;
end $$;
create trigger audit after insert or update on {schema}.tasks for each row execute function {schema}.audit_task();
create function {schema}.audit_limit() returns trigger language plpgsql as $$
begin
    insert into {schema}.limit_audit (name, concurrency, starts, period_s, burst, sliding)
    values (new.name, new.concurrency, new.starts, new.period_s, new.burst, new.sliding);
    return null;
end $$;
do $$
begin
    if to_regclass('{schema}.limits') is not null then
        create trigger audit after insert or update on {schema}.limits for each row execute function {schema}.audit_limit();
    end if;
end $$;
"""

LINE_FACTS = """
           with held as (
               select u.gate, sum(coalesce(t.costs[u.place], 1)) as units
               from {schema}.tasks t cross join unnest(t.gates) with ordinality as u (gate, place)
               where t.state in ('CLAIMED', 'RUNNING') group by u.gate
           ), freed as (
               select u.gate, sum(coalesce(c.costs[u.place], 1)) as units
               from {schema}.line_changes c cross join unnest(c.gates) with ordinality as u (gate, place) where c.freed group by u.gate
           ), waits as (
               select t.serial, bool_or(t.state <> 'PENDING') as is_held, min(t.enqueued_at) filter (where t.state = 'PENDING') as due_at
               from {schema}.tasks t
               where t.serial is not null and t.state in ('PENDING', 'CLAIMED', 'RUNNING')
                 and (t.state <> 'PENDING' or t.good_until is null or t.good_until > now())
                 and t.fence < 9223372036854775807 and t.attempt < 2147483647
               group by t.serial having bool_or(t.state = 'PENDING')
           ), unchanged as (
               select w.* from waits w where not exists (select from {schema}.line_changes c where c.line = w.serial)
           ), grant_at as (
               select u.gate, split_part(u.gate, '/', 1) as limit_name, a.started_at as at, u.cost
               from (
                   select a.task_id, a.started_at from {schema}.attempts a
                   union all
                   select id, started_at from {schema}.tasks where state = 'RUNNING'
               ) a
               join {schema}.tasks t on t.id = a.task_id
               cross join lateral (
                   select x.gate, coalesce(t.costs[x.place], 1) as cost from unnest(t.gates) with ordinality as x (gate, place)
               ) u
           ), number as (
               select name, min(starts) as starts, min(period_s) as period_s, min(burst) as burst, bool_or(sliding) as sliding
               from {schema}.limit_audit group by name
               having count(distinct (starts, period_s, burst, sliding)) = 1 and min(starts) is not null
           )"""
"""What several queries about lines and gates need: units by gate, lines with waiting tasks, times of starts, and rates that never changed."""

# The number, the forbidden state, and the query that finds it. These states are forbidden in every snapshot.
LINE_QUERIES: tuple[tuple[str, str, str], ...] = (
    (
        "I19",
        "a gate counts the permits of leases, and those whose release has not been applied",
        LINE_FACTS
        + """
           select coalesce(g.gate, h.gate, f.gate), g.held, h.units, f.units
           from {schema}.gates g full join held h on h.gate = g.gate full join freed f on f.gate = coalesce(g.gate, h.gate)
           where coalesce(g.held, 0) <> coalesce(h.units, 0) + coalesce(f.units, 0)""",
    ),
    (
        "I19",
        "every line with a waiting task exists, or the change that creates it is noted",
        LINE_FACTS
        + "select u.serial from unchanged u where not exists (select from {schema}.lines l where l.line = u.serial)",
    ),
    (
        "I19",
        "no line is idle while a task of it waits",
        LINE_FACTS
        + """
           select l.line, u.due_at from unchanged u join {schema}.lines l on l.line = u.serial
           where l.state = 'I' and not (l.is_strict and u.is_held)""",
    ),
    (
        "I19",
        "no line waits for a time later than that of its first task",
        LINE_FACTS
        + """
           select l.line, l.at, u.due_at from unchanged u join {schema}.lines l on l.line = u.serial
           where l.state = 'W' and l.at > greatest(u.due_at, now()) + interval '2 seconds' and not l.is_strict""",
    ),
    (
        "I19",
        "no line waits for a gate that has room, unless the gate opens by itself or its change or that of its limit is noted",
        """select l.line, l.blocked, g.held, m.concurrency, g.opens_at from {schema}.lines l
           left join {schema}.gates g on g.gate = l.blocked left join {schema}.limits m on m.name = g.limit_name
           where l.state = 'B' and g.opens_at is null
             and (g.gate is null or coalesce({schema}.limit_room(g, m, extract(epoch from now())), 1000000)
                 >= coalesce(l.costs[array_position(l.gates, l.blocked)], 1))
             and l.line = (
                 select f.line from {schema}.lines f where f.state = 'B' and f.blocked = l.blocked
                 order by f.priority, f.credit = 0, f.turn limit 1
             )
             and coalesce((to_jsonb(g) ->> 'version')::bigint, 0) >= coalesce((to_jsonb(m) ->> 'version')::bigint, 0)
             and not exists (select from {schema}.line_changes c where c.line = l.line or l.blocked = any(c.gates))""",
    ),
)

# The number, the forbidden history, and the query that finds it in the audit and in the stored times.
HISTORY_QUERIES: tuple[tuple[str, str, str], ...] = (
    (
        "I19",
        "at no point of the audit, more permits of a gate are held than the largest number of its limit",
        """select gate, at, held, allowed from (
               select u.gate, a.at, m.allowed,
                   sum(case when a.new in ('CLAIMED', 'RUNNING') then u.cost else -u.cost end)
                       over (partition by u.gate order by a.seq) as held
               from {schema}.audit a
               join {schema}.tasks t on t.id = a.task_id
               cross join lateral (
                   select x.gate, coalesce(t.costs[x.place], 1) as cost from unnest(t.gates) with ordinality as x (gate, place)
               ) u
               join (
                   select name, max(concurrency) as allowed from {schema}.limit_audit group by name having count(*) = count(concurrency)
               ) m on m.name = split_part(u.gate, '/', 1)
               where (coalesce(a.old, 'PENDING') in ('CLAIMED', 'RUNNING')) <> (a.new in ('CLAIMED', 'RUNNING'))
           ) sweep where held > allowed""",
    ),
    (
        "I19",
        "no more starts than the burst and the rate allow, by the stored times",
        LINE_FACTS
        + """
           select gate, at, above from (
               select s.gate, s.at, n.burst, s.units - extract(epoch from s.at) * n.starts / n.period_s
                   - min(s.units - s.cost - extract(epoch from s.at) * n.starts / n.period_s)
                       over (partition by s.gate order by s.units rows unbounded preceding) as above
               from (select g.*, sum(g.cost) over (partition by g.gate order by g.at, g.cost rows unbounded preceding) as units from grant_at g) s
               join number n on n.name = s.limit_name
               where not n.sliding
           ) windows where above > burst + 0.02""",
    ),
    (
        "I19",
        "no window of a sliding limit contains more starts than allowed, by the stored times",
        LINE_FACTS
        + """
           select gate, at, earlier from (
               select g.gate, g.at, n.period_s, lag(g.at, n.starts) over (partition by g.gate order by g.at) as earlier
               from grant_at g join number n on n.name = g.limit_name cross join generate_series(1, g.cost)
               where n.sliding
           ) starts where at - earlier < (period_s - 0.0005) * interval '1 second'""",
    ),
    (
        "I24",
        "the tasks of a serial line run one at a time",
        """select serial, at, held from (
               select t.serial, a.at, sum(case when a.new in ('CLAIMED', 'RUNNING') then 1 else -1 end)
                   over (partition by t.serial order by a.seq) as held
               from {schema}.audit a join {schema}.tasks t on t.id = a.task_id
               where t.serial is not null and not starts_with(t.serial, 'limit:')
                 and (coalesce(a.old, 'PENDING') in ('CLAIMED', 'RUNNING')) <> (a.new in ('CLAIMED', 'RUNNING'))
           ) sweep where held > 1""",
    ),
    (
        "I24",
        "no task of a serial line starts before an unfinished earlier task that was committed when it was sent",
        """with strict as materialized (
               select * from {schema}.tasks t where t.serial is not null and not starts_with(t.serial, 'limit:')
           ), moved as materialized (select * from {schema}.audit a where a.task_id in (select id from strict))
           select t.serial, t.id, e.id from moved a join strict t on t.id = a.task_id
           join moved sent on sent.task_id = t.id and sent.old is null
           join strict e on e.serial = t.serial and (e.serial_at, e.id) < (t.serial_at, t.id)
                and e.fence < 9223372036854775807 and e.attempt < 2147483647
           join moved earlier on earlier.task_id = e.id and earlier.old is null
                and pg_visible_in_snapshot(earlier.xid, sent.seen)
           where a.old = 'PENDING' and a.new in ('CLAIMED', 'RUNNING')
             and not exists (
                 select from moved ended
                 where ended.task_id = e.id and ended.seq < a.seq and ended.new in ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED')
             )
             and not exists (
                 select from {schema}.audit again
                 where again.task_id in (e.id, t.id) and again.new = 'PENDING' and again.old in ('FAILED', 'CANCELLED', 'EXPIRED')
             )""",
    ),
)

# The number, the forbidden state, and the query that finds it.
QUERIES: tuple[tuple[str, str, str], ...] = (
    (
        "I3",
        "a lease exists exactly in CLAIMED and RUNNING, and its holder is known",
        """select id, state from {schema}.tasks
           where (state in ('CLAIMED', 'RUNNING')) <> (claim_id is not null)
              or (state in ('CLAIMED', 'RUNNING') and (claimed_by_worker_id is null or claimed_at is null))
              or (state = 'RUNNING' and started_at is null)""",
    ),
    (
        "I4",
        "fences of a task strictly grow",
        """select task_id, fence from (
               select task_id, fence, lag(fence) over (partition by task_id order by attempt) as before from {schema}.attempts a) a
           where fence <= before""",
    ),
    (
        "I7",
        "COMPLETED has exactly one completed attempt, and nothing else has one",
        """select t.id, t.state, count(a.task_id) from {schema}.tasks t
           left join {schema}.attempts a on a.task_id = t.id and a.outcome = 'COMPLETED'
           group by t.id, t.state having (t.state = 'COMPLETED') <> (count(a.task_id) = 1)""",
    ),
    (
        "I8",
        "the completed attempt is the last one",
        """select a.task_id, a.attempt from {schema}.attempts a join {schema}.tasks t on t.id = a.task_id
           where a.outcome = 'COMPLETED' and a.attempt <> t.attempt""",
    ),
    (
        "I15",
        "crash and loss counters are the counted attempts",
        """select t.id, t.crash_count, t.loss_count from {schema}.tasks t
           left join {schema}.attempts a on a.task_id = t.id and a.attempt > t.counted_from
           group by t.id, t.crash_count, t.loss_count
           having t.crash_count <> count(*) filter (where a.outcome = 'CRASHED')
               or t.loss_count <> count(*) filter (where a.outcome = 'LOST')""",
    ),
    (
        "I16",
        "only a retried failure, crash or loss is charged as a retry, unless a hook said what is charged",
        """select t.id, t.retry_count from {schema}.tasks t
           left join {schema}.attempts a on a.task_id = t.id and a.attempt > t.counted_from and a.will_retry
                and a.outcome in ('FAILED', 'CRASHED', 'LOST')
           where not exists (select from {schema}.recoveries r where r.task_id = t.id and r.action = 'reschedule')
           group by t.id, t.retry_count having t.retry_count <> count(a.task_id)""",
    ),
    (
        "I17",
        "no start after good_until, none before the task was due",
        """select a.task_id, a.attempt from {schema}.attempts a join {schema}.tasks t on t.id = a.task_id
           where a.started_at > t.good_until or a.started_at < t.sent_at""",
    ),
    (
        "I18",
        "after a cancel request nothing is retried",
        """select task_id, new from {schema}.audit where cancel_requested and old = 'RUNNING' and new = 'PENDING'""",
    ),
    (
        "I23",
        "attempts are numbered from 1 without gaps, and each ended run has its row",
        """select t.id, t.attempt, count(a.task_id), max(a.attempt) from {schema}.tasks t
           left join {schema}.attempts a on a.task_id = t.id
           group by t.id, t.state, t.attempt
           having count(a.task_id) <> t.attempt - (t.state = 'RUNNING')::integer or coalesce(max(a.attempt), 0) > t.attempt""",
    ),
    (
        "I21",
        "node and task agree",
        """select n.workflow_id, n.name, n.state, t.state from {schema}.nodes n join {schema}.tasks t on t.id = n.task_id
           where n.kind = 'task' and n.error is null and n.state in ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED')
             and n.state <> t.state""",
    ),
    (
        "I21",
        "a node is enqueued at most once per iteration",
        """select t.workflow_id, t.node, count(*) from {schema}.tasks t
           join {schema}.nodes n on n.workflow_id = t.workflow_id and n.number = t.node
           group by t.workflow_id, t.node, n.iteration having count(*) > n.iteration""",
    ),
    (
        "I21",
        "no node begins before its dependencies",
        """select n.workflow_id, n.name, e.parent from {schema}.nodes n
           join {schema}.edges e on e.workflow_id = n.workflow_id and e.child = n.number and not e.joins and e.state <> 'MET'
           where n.task_id is not null and n.state in ('ENQUEUED', 'COMPLETED', 'FAILED', 'EXPIRED')""",
    ),
    (
        "I22",
        "a workflow is final exactly when all its nodes are",
        """select w.id, w.state from {schema}.workflows w
           where exists (
               select from {schema}.nodes n where n.workflow_id = w.id and n.state in ('PENDING', 'READY', 'ENQUEUED')
           ) = (w.state in ('COMPLETED', 'FAILED', 'CANCELLED'))
             and w.state <> 'PAUSED' and not exists (select from {schema}.outbox o where o.workflow_id = w.id)
             and exists (select from {schema}.nodes n where n.workflow_id = w.id)""",
    ),
    (
        "I25",
        "what ended stands in the outbox until its node has ended, too",
        """select n.workflow_id, n.name, t.state from {schema}.nodes n join {schema}.tasks t on t.id = n.task_id
           where n.kind = 'task' and n.state = 'ENQUEUED' and t.state in ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED')
             and not exists (
                 select from {schema}.outbox o where o.workflow_id = n.workflow_id and (o.node = n.number or o.node is null)
             )""",
    ),
    (
        "I25",
        "the outbox tells of nodes that are there",
        """select o.id from {schema}.outbox o
           where o.node >= 0 and not exists (
               select from {schema}.nodes n where n.workflow_id = o.workflow_id and n.number = o.node
           )""",
    ),
    (
        "I30",
        "a marked task is held only by a worker whose code understands it, as far as that worker registered",
        """select t.id, t.name, t.needs::text, w.id from {schema}.tasks t join {schema}.workers w on w.id = t.claimed_by_worker_id
           cross join lateral (select w.metadata::jsonb -> 'parameters' -> t.name as own) registered
           where t.claim_id is not null and t.needs is not null and not (
               (jsonb_typeof(own -> 'takes') = 'null' or (own -> 'takes') @> (t.needs::jsonb -> 'arguments'))
               and (t.needs::jsonb -> 'arguments') @> (own -> 'requires')
           )""",
    ),
    (
        "I31",
        "a task of a tick has the row of this tick, and no other task has it",
        """select t.id, t.schedule, t.tick from {schema}.tasks t
           left join {schema}.ticks k on k.schedule = t.schedule and k.at = t.tick
           where t.tick is not null and k.task_id is distinct from t.id""",
    ),
    (
        "I31",
        "the task of a sent tick was inserted",
        """select k.schedule, k.at, k.task_id from {schema}.ticks k
           where k.outcome = 'SENT' and not exists (
               select from {schema}.audit a where a.task_id = k.task_id and a.old is null
           )""",
    ),
    (
        "I32",
        "no tick is decided twice: a series of missed ticks covers no other row, unless an operator sent it later",
        """select a.schedule, a.at, b.at from {schema}.ticks a
           join {schema}.ticks b on b.schedule = a.schedule and b.at > a.at and b.at <= a.last_at
           where b.detail is distinct from 'backfill'""",
    ),
    (
        "I32",
        "no decided tick is later than the moment up to which its schedule is decided, unless the schedule was changed since",
        """select k.schedule, k.at, s.decided_to from {schema}.ticks k join {schema}.schedules s on s.name = k.schedule
           where coalesce(k.last_at, k.at) > s.decided_to and s.changed_at <= k.decided_at""",
    ),
    (
        "I33",
        "a task has its key as long as its scope demands, so no other task has it",
        """select t.id, t.name, t.unique_key, t.unique_for, t.state from {schema}.tasks t
           where t.unique_key is not null
             and case t.unique_for
                 when 'waiting' then t.state = 'PENDING' and t.fence = 0
                 when 'kept' then true
                 else t.state in ('PENDING', 'CLAIMED', 'RUNNING')
             end
             and not exists (
                 select from {schema}.unique_keys u
                 where u.name = t.name and u.key = t.unique_key and u.task_id = t.id and u.until is null
             )""",
    ),
    (
        "I33",
        "a key that is taken belongs to a task that is there and still has it",
        """select u.name, u.key, u.task_id, u.until, t.state, t.unique_for from {schema}.unique_keys u
           left join {schema}.tasks t on t.id = u.task_id and t.name = u.name and t.unique_key = u.key
           where (u.until is null or u.until > clock_timestamp())
             and (t.id is null or u.until is null and t.unique_for <> 'kept' and case t.unique_for
                 when 'waiting' then t.state <> 'PENDING'
                 else t.state in ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED')
             end)""",
    ),
    (
        "I33",
        "no task was sent within the period after the end of a task with the same key",
        """select a.id, b.id, a.unique_for from {schema}.tasks a
           join {schema}.tasks b on b.name = a.name and b.unique_key = a.unique_key and b.id <> a.id and b.sent_at >= a.sent_at
           where a.unique_for not in ('waiting', 'kept') and a.retry_call is null
             and b.sent_at < coalesce(a.completed_at, a.failed_at, a.cancelled_at, a.expired_at)
                 + case when a.unique_for not in ('waiting', 'kept') then a.unique_for::interval end""",
    ),
    (
        "I35",
        "each final failure of a task with a failure handler sent exactly one task",
        """with failed as (
               select a.task_id, count(*) as times from {schema}.audit a
               where a.new in ('FAILED', 'EXPIRED') and a.old is distinct from a.new and a.old is not null
               group by a.task_id
           ), handled as materialized (
               select t.id, t.policy -> 'on_failure' ->> 'name' as name
               from {schema}.tasks t where position('"on_failure"' in t.policy::text) > 0
           )
           select h.id, coalesce(f.times, 0), count(s.id) from handled h
           left join failed f on f.task_id = h.id
           left join {schema}.tasks s on s.name = h.name and position('"task_id" : "' || h.id || '"' in s.args::text) > 0
           where h.name is not null
           group by h.id, f.times having count(s.id) <> coalesce(f.times, 0)""",
    ),
    (
        "I26",
        "no lease of an ended worker",
        """select t.id, t.claimed_by_worker_id from {schema}.tasks t join {schema}.workers w on w.id = t.claimed_by_worker_id
           where t.claim_id is not null and w.ended_at is not null""",
    ),
)


BY_THE_CLOCK: Final = "no task of a batch has a later end than the batch"
"""A rule that compares times. It says nothing if the clock of the database was set back during the test."""
BATCH_QUERIES: tuple[tuple[str, str, str], ...] = (
    (
        "I38",
        "the numbers and the events of a batch count its tasks",
        """select b.id, b.name, n.* from {schema}.batches b
           cross join lateral (
               select
                   b.total + coalesce((select sum(e.number) from {schema}.batch_events e where e.batch_id = b.id and e.state is null), 0) as total,
                   b.completed + b.failed + b.cancelled + b.expired
                       + coalesce((select sum(e.number) from {schema}.batch_events e where e.batch_id = b.id and e.state is not null), 0) as ended,
                   (select count(*) from {schema}.tasks t where t.batch_id = b.id) as tasks,
                   (select count(*) from {schema}.tasks t
                    where t.batch_id = b.id and t.state in ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED')) as ended_tasks
           ) n
           where n.total <> n.tasks or n.ended <> n.ended_tasks""",
    ),
    (
        "I38",
        "a batch has ended, or it is open, or a task of it is live, or an event is noted that ends it",
        """select b.id, b.name from {schema}.batches b
           where b.ended_at is null and b.sealed_at is not null
             and not exists (select from {schema}.batch_events e where e.batch_id = b.id)
             and not exists (select from {schema}.tasks t where t.batch_id = b.id and t.state in ('PENDING', 'CLAIMED', 'RUNNING'))""",
    ),
    (
        "I39",
        "no batch ends before it is sealed and all its tasks have ended, unless an operator retried one later",
        """select b.id, b.name, t.id, t.state from {schema}.batches b
           left join {schema}.tasks t on t.batch_id = b.id and t.retry_call is null and t.state in ('PENDING', 'CLAIMED', 'RUNNING')
           where b.ended_at is not null and (b.sealed_at is null or t.id is not null)""",
    ),
    (
        "I39",
        BY_THE_CLOCK,
        """select b.id, b.name, t.id, t.state from {schema}.batches b
           left join {schema}.tasks t on t.batch_id = b.id and t.retry_call is null
                and greatest(t.completed_at, t.failed_at, t.cancelled_at, t.expired_at) > b.ended_at
           where b.ended_at is not null and (b.sealed_at > b.ended_at or t.id is not null)""",
    ),
    (
        "I39",
        "the callbacks of a batch are inserted after all its tasks have ended",
        """select b.id, b.name, t.id, e.seq, a.seq from {schema}.batches b
           cross join lateral (values (b.on_end), (b.on_success)) c (call)
           join {schema}.audit a on a.task_id = (c.call ->> 'id')::uuid and a.old is null
           join {schema}.tasks t on t.batch_id = b.id and t.retry_call is null
           join {schema}.audit e on e.task_id = t.id and e.new in ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED') and e.seq > a.seq""",
    ),
    (
        "I39",
        "the callbacks of a batch were inserted once when it ended, and not before",
        """select b.id, b.name, c.call ->> 'id' as callback, count(a.seq) from {schema}.batches b
           cross join lateral (
               values (b.on_end, b.ended_at is not null),
                   (b.on_success, b.ended_at is not null and b.failed + b.cancelled + b.expired = 0 and not exists (
                       select from {schema}.tasks t where t.batch_id = b.id and t.retry_call is not null
                   ))
           ) as c (call, is_due)
           left join {schema}.audit a on a.task_id = (c.call ->> 'id')::uuid and a.old is null
           where c.call is not null
           group by b.id, b.name, c.call ->> 'id', c.is_due
           having count(a.seq) <> c.is_due::integer""",
    ),
    (
        "I39",
        "a task that waits for a gather waits for one that has not ended, or is due",
        """select t.id, t.waits_for, b.ended_at from {schema}.tasks t
           join {schema}.batches b on b.waiter_id = t.id and t.waits_for = 'gather/' || b.name
           where b.ended_at is not null and t.state = 'PENDING' and t.wake_at > now() + interval '1 year'""",
    ),
)

# Queries that mention these names find nothing unless such rows exist. Most tests have none, and PostgreSQL would plan each
# query of every test anew.
_LINES: Final = """exists (select from {schema}.gates) or exists (select from {schema}.lines)
    or exists (select from {schema}.line_changes)
    or exists (select from {schema}.tasks where gates is not null or serial is not null)"""
_ROWS: Final = {
    re.compile(r"\{schema\}\.(?:nodes|edges|workflows|outbox)\b"): (
        "exists (select from {schema}.nodes) or exists (select from {schema}.workflows) or exists (select from {schema}.outbox)"
    ),
    re.compile(r"\{schema\}\.ticks\b"): (
        "exists (select from {schema}.ticks) or exists (select from {schema}.tasks where tick is not null)"
    ),
    re.compile(
        r"\bon_failure\b"
    ): "exists (select from {schema}.tasks where position('\"on_failure\"' in policy::text) > 0)",
    re.compile(r"\bunique_keys?\b"): (
        "exists (select from {schema}.unique_keys) or exists (select from {schema}.tasks where unique_key is not null)"
    ),
}


_HISTORY: Final = (
    "I34",
    "a task is in one of the tables, and its records are with it",
    """select h.id, t.state from {schema}.history h left join {schema}.tasks t on t.id = h.id
       where t.id is not null or exists (select from {schema}.attempts a where a.task_id = h.id)
          or exists (select from {schema}.steps s where s.task_id = h.id)
          or exists (select from {schema}.signals s where s.target = h.id)
          or exists (select from {schema}.recoveries r where r.task_id = h.id)
          or h.ended_at is distinct from greatest(h.completed_at, h.failed_at, h.cancelled_at, h.expired_at)""",
)
_LABELS: Final = (
    "I36",
    "each task and workflow has exactly its labels in the search index",
    """with labelled as (
           select id, labels from {schema}.all_tasks where jsonb_typeof(labels) = 'object'
           union all
           select id, labels from {schema}.workflows where jsonb_typeof(labels) = 'object'
       ), due as (
           select l.id, e.key, e.value from labelled l cross join lateral jsonb_each_text(l.labels) e
       )
       select coalesce(d.id, l.id), coalesce(d.key, l.key), d.id is null as is_surplus
       from due d
       full join {schema}.labels l on l.id = d.id and l.key = d.key and l.value = d.value
       where l.id is null or d.id is null and (
           exists (select from {schema}.all_tasks t where t.id = l.id) or exists (select from {schema}.workflows w where w.id = l.id)
       )""",
)
_HAS_LABELS: Final = """exists (select from {schema}.labels) or exists (select from {schema}.tasks where labels is not null)
    or exists (select from {schema}.history where labels is not null) or exists (select from {schema}.workflows where labels is not null)"""
_STREAMS: Final = (
    "I37",
    "the items of a stream are numbered from 1 without gaps, and no item of an earlier attempt follows one of a later attempt",
    """select task_id, name, count(*), max(number) from {schema}.stream_items group by task_id, name
       having min(number) <> 1 or max(number) <> count(*)
       union all
       select task_id, name, number, attempt from (
           select i.*, lag(i.attempt) over (partition by i.task_id, i.name order by i.number) as before from {schema}.stream_items i
       ) items where before > attempt""",
)
_BULK: Final = (
    "I40",
    "the audit log has one row about the request of each bulk action, and one about its end, with the number of tasks that it changed",
    """select b.id, b.state, b.done, l.requests, l.ends from {schema}.bulk_actions b
       cross join lateral (
           select count(*) filter (where l.outcome = 'requested') as requests,
               array_agg(l.affected) filter (where l.outcome <> 'requested') as ends
           from {schema}.audit_log l where l.target = b.id::text and l.action = b.action || '_all'
       ) l
       where l.requests <> 1 or l.ends is distinct from case when b.ended_at is not null then array[b.done] end""",
)
_RECORDS: Final = "(select x.* from {{schema}}.{0} x union all select x.* from {{schema}}.history h cross join lateral unnest(h.{0}) x)"
_BOTH: Final = {
    "{schema}.tasks": "{schema}.all_tasks",
    "{schema}.attempts": _RECORDS.format("attempts"),
    "{schema}.recoveries": _RECORDS.format("recoveries"),
}
"""What the queries read if tasks have moved to the history."""


@dataclass(frozen=True, slots=True)
class Breach:
    """A row that an invariant forbids."""

    number: str
    rule: str
    rows: tuple[Any, ...]


def install_audit(connection: Connection[Any], schema: str) -> None:
    """Record every transition from now on."""
    connection.execute(sql.SQL(AUDIT).format(schema=sql.Identifier(schema)))


def line_breaches(connection: Connection[Any], schema: str, *, history: bool = True) -> list[Breach]:
    """Return the broken invariants of lines and gates. They hold in every snapshot, so tasks can be in flight."""
    found = []
    if connection.execute("select to_regclass(%s)", [f'"{schema}".limits']).fetchone() == (None,):
        return []  # the schema is older
    if not _present(connection, schema, [_LINES])[0]:
        return []
    moved = has_moved(connection, schema)
    for number, rule, query in (*LINE_QUERIES, *(HISTORY_QUERIES if history else ())):
        text = of_both(query) if moved else query
        rows = connection.execute(sql.SQL(text).format(schema=sql.Identifier(schema))).fetchall()
        if rows:
            found.append(Breach(number, rule, tuple(rows[:5])))
    return found


def label_breaches(connection: Connection[Any], schema: str) -> list[Breach]:
    """Return the labels that are missing in the search index, or that are there although their task does not have them."""
    if connection.execute("select to_regclass(%s)", [f'"{schema}".labels']).fetchone() == (None,):
        return []  # the schema is older
    if not _present(connection, schema, [_HAS_LABELS])[0]:
        return []
    number, rule, query = _LABELS
    rows = connection.execute(sql.SQL(query).format(schema=sql.Identifier(schema))).fetchall()
    return [Breach(number, rule, tuple(rows[:5]))] if rows else []


def settled_line_breaches(connection: Connection[Any], schema: str) -> list[Breach]:
    """Apply all noted changes, and return the broken invariants of lines and gates, including permits that no lease holds.

    No other transaction may have locks of lines or gates.
    """
    own = sql.Identifier(schema)
    apply = sql.SQL(
        "select applied, is_busy from {}.apply_line_changes(2000, array['none'], null, null)"
    ).format(own)
    for _ in range(1000):
        if connection.execute(apply).fetchone() == (0, False):
            break
    else:
        return [Breach("I19", "the noted changes can all be applied", ())]
    found = line_breaches(connection, schema)
    left = connection.execute(sql.SQL("select * from {}.line_changes limit 5").format(own)).fetchall()
    return found + ([Breach("I19", "no change is left once all are applied", tuple(left))] if left else [])


def breaches(connection: Connection[Any], schema: str) -> list[Breach]:
    """Return the broken invariants of this schema, including the audit. No task may be in flight."""
    found = line_breaches(connection, schema)
    present = dict(zip(_ROWS, _present(connection, schema, [*_ROWS.values()]), strict=True))
    moved = has_moved(connection, schema)
    others = [
        *(BATCH_QUERIES if has_batches(connection, schema) else ()),
        *([_HISTORY] if moved else []),
        *([_BULK] if has_table(connection, schema, "bulk_actions") else []),
        *([_STREAMS] if has_table(connection, schema, "stream_items") else []),
    ]
    for number, rule, query in (*QUERIES, *others):
        if any(pattern.search(query) and not there for pattern, there in present.items()):
            continue
        text = of_both(query) if moved and query is not _HISTORY[2] else query
        rows = connection.execute(sql.SQL(text).format(schema=sql.Identifier(schema))).fetchall()
        if rows:
            found.append(Breach(number, rule, tuple(rows[:5])))
    found += label_breaches(connection, schema)
    legal = {(move.old.value if move.old else None, move.new.value) for move in TRANSITIONS}
    moves = connection.execute(
        sql.SQL("select task_id, old, new from {}.audit where old is distinct from new").format(
            sql.Identifier(schema)
        )
    ).fetchall()
    illegal = tuple(row for row in moves if (row[1], row[2]) not in legal)
    if illegal:
        found.append(Breach("I6", "only legal transitions", illegal[:5]))
    return found


def has_table(connection: Connection[Any], schema: str, name: str) -> bool:
    """Return whether the schema has this table. An older schema might not."""
    row = connection.execute("select to_regclass(%s) is not null as there", [f'"{schema}".{name}']).fetchone()
    assert row is not None
    return bool(row["there"] if isinstance(row, dict) else row[0])


def has_moved(connection: Connection[Any], schema: str) -> bool:
    """Return whether tasks have moved to the history."""
    if not has_table(connection, schema, "history"):
        return False
    return _present(connection, schema, ["exists (select from {schema}.history)"])[0]


def has_batches(connection: Connection[Any], schema: str) -> bool:
    """Return whether there are batches or gathers."""
    if connection.execute("select to_regclass(%s)", [f'"{schema}".batches']).fetchone() == (None,):
        return False  # the schema is older
    return _present(connection, schema, ["exists (select from {schema}.batches)"])[0]


def of_both(query: str) -> str:
    """Return the query so that it reads the history, too."""
    return re.sub("|".join(map(re.escape, _BOTH)), lambda found: _BOTH[found[0]], query)


def _present(connection: Connection[Any], schema: str, conditions: list[str]) -> tuple[bool, ...]:
    text = "select array[" + ", ".join(f"({one})" for one in conditions) + "] as present"
    row = connection.execute(sql.SQL(text).format(schema=sql.Identifier(schema))).fetchone()  # type: ignore[arg-type]
    assert row is not None
    (present,) = row.values() if isinstance(row, dict) else row
    return tuple(present)


def check_invariants(
    url: str, schema: str, *, sent: set[Any] | None = None, deadlocks_before: int | None = None
) -> None:
    """Assert every invariant; with `sent`, also that no acknowledged task is missing (I1) and that no other task exists (I2)."""
    with psycopg.connect(url, autocommit=True) as connection:
        broken = breaches(connection, schema)
        assert broken == [], broken
        if sent is not None:
            there = {
                row[0]
                for row in connection.execute(
                    sql.SQL("select id from {}.all_tasks").format(sql.Identifier(schema))
                )
            }
            assert sent - there == set(), "I1: acknowledged tasks are missing"
            assert there - sent == set(), "I2: tasks that nobody sent"
        if deadlocks_before is not None:
            assert deadlocks(connection) == deadlocks_before, "I27: deadlocks"


def deadlocks(connection: Connection[Any]) -> int:
    """Return how many deadlocks this database has seen."""
    row = connection.execute(
        "select deadlocks from pg_stat_database where datname = current_database()"
    ).fetchone()
    assert row is not None
    return int(row[0])
