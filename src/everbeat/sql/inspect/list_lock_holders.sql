-- List sessions that other sessions have been waiting for too long. Each holds a lock on a table or index of this schema, or blocks a
-- session of everbeat. A session that is itself waiting for a lock is not the cause and is left out. For a session of a tree, the row names
-- the host.
with waiting as materialized (
    select l.pid, min(coalesce(l.waitstart, statement_timestamp())) as since
    from pg_locks l
    where not l.granted and l.pid is not null
    group by l.pid
    having (extract(epoch from statement_timestamp() - min(l.waitstart)) * 1000) > %(older_than_ms)s
),
held as (
    select b.pid, count(distinct w.pid) as waiters, min(w.since) as since, bool_or(a.application_name like 'everbeat%%') as is_ours
    from waiting w
    cross join unnest(pg_blocking_pids(w.pid)) b (pid)
    left join pg_stat_activity a on a.pid = w.pid
    where b.pid not in (select other.pid from waiting other)
    group by b.pid
)
select
    nullif(h.pid, 0), nullif(a.application_name, ''), a.usename::text, a.state, a.wait_event, h.waiters, h.since,
    extract(epoch from statement_timestamp() - h.since)::float8 as waited_s,
    (
        select s.hostname from {schema}.supervisors s
        where s.session_name = split_part(a.application_name, ' ', 1)
        order by s.started_at desc limit 1
    ) as hostname
from held h
left join pg_stat_activity a on a.pid = h.pid
where h.is_ours or exists (
    select from pg_locks l
    join pg_class c on c.oid = l.relation
    join pg_namespace n on n.oid = c.relnamespace and n.nspname = %(schema)s
    where l.pid = h.pid and l.granted and l.database = (select d.oid from pg_database d where d.datname = current_database())
)
order by h.since
limit 5
