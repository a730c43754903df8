-- Count the live tasks of each queue and store the counts, if this tree gets the turn for it. Return no row without a turn, and otherwise whether
-- the sample is the first of its minute. Such a sample also stores the size of the tables. The counts are those of inspect/list_queues.
-- A condition without columns comes first in the plan, so without a turn no task is read. The times of samples are multiples of
-- minutes and hours in UTC. Samples of the future do not count, because the clock was set back since. A repeated statement writes one more
-- sample, which does no harm.
with recursive turn as (
    {fragment/turn}
), {fragment/queue_counts}, moment as materialized (
    select
        not exists (
            select from {schema}.depths d
            where d.seconds = 3600 and d.at >= date_bin('1 hour', statement_timestamp(), timestamptz '2000-01-01 00:00+00') and d.at <= statement_timestamp()
        ) as is_hour,
        not exists (
            select from {schema}.depths d
            where d.seconds in (60, 3600) and d.at >= date_bin('1 minute', statement_timestamp(), timestamptz '2000-01-01 00:00+00')
              and d.at <= statement_timestamp()
        ) as is_minute
    from turn
), kept as materialized (
    select case when m.is_hour then 3600 when m.is_minute then 60 else 10 end as seconds, m.is_minute from moment m
), counts as (
    insert into {schema}.depths (seconds, at, queue, due, scheduled, suspended, claimed, running, oldest_due_s, at_least)
    select
        (select k.seconds from kept k), statement_timestamp(), c.queue, c.pending, greatest(c.later - c.suspended, 0), c.suspended, c.claimed, c.running,
        c.oldest_due_s,
        array_remove(array[
            case when c.has_more_pending then 'due' end, case when c.has_more_later then 'scheduled' end,
            case when c.has_more_later then 'suspended' end, case when c.has_more_claimed then 'claimed' end,
            case when c.has_more_running then 'running' end
        ], null)
    from queue_count c
    where (select k.seconds from kept k) is not null
), sizes as (
    insert into {schema}.depths (seconds, at, table_bytes, dead_rows, oldest_transaction_s)
    select k.seconds, statement_timestamp(), size.bytes, size.dead_rows, oldest.age_s
    from kept k
    cross join lateral (
        select sum(pg_total_relation_size(c.oid))::bigint as bytes, sum(pg_stat_get_dead_tuples(c.oid))::bigint as dead_rows
        from pg_class c where c.relnamespace = '{schema}'::regnamespace and c.relkind = 'r'
    ) size
    cross join lateral (
        select extract(epoch from statement_timestamp() - min(x.since))::float8 as age_s
        from (
            select a.xact_start as since from pg_stat_activity a
            where a.pid <> pg_backend_pid() and a.backend_type = 'client backend' and (a.backend_xmin is not null or a.backend_xid is not null)
            union all
            select p.prepared from pg_prepared_xacts p where p.database = current_database()
        ) x
    ) oldest
    where k.is_minute
)
select k.is_minute from kept k
