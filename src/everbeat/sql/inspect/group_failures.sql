-- Group the tasks that FAILED or EXPIRED by name, error code and class, the latest group first. The statement examines a limited number
-- of tasks (`most`). It reads the tasks that failed last through an index (tasks_failed, history_failed). Of the other tasks, it reads the
-- newest, through the primary key. An error that was stored by hand and cannot be read as text has no code, class or message.
-- Return one row without a group if there is none. `continue_before`: earlier failures were not examined. Many tasks can fail at the same
-- moment, so those of the earliest moment are left to the next call, unless there are no others. `hours_ago` has an entry for each failure of the
-- last 24 hours.
with failed as materialized (
    select t.id, t.name, t.queue, t.state, t.failed_at as at, t.error, t.labels
    from {schema}.all_tasks t
    where t.state = 'FAILED' and t.failed_at > '0002-01-01 00:00:00+00' and t.failed_at <= statement_timestamp()
      and (%(before)s::timestamptz is null or t.failed_at < %(before)s)
      and (%(since)s::timestamptz is null or t.failed_at >= %(since)s)
      and (%(within_ms)s::bigint is null or t.failed_at >= statement_timestamp() - %(within_ms)s * interval '1 millisecond')
    order by t.failed_at desc
    limit %(most)s
), stop as materialized (
    select case when count(*) = %(most)s then min(l.at) end as at, min(l.at) < max(l.at) as is_left_out from failed l
), expired as materialized (
    select n.id, n.name, n.queue, n.state, n.expired_at as at, n.error, n.labels
    from (select t.* from {schema}.all_tasks t order by t.id desc limit %(most)s) n
    where n.state = 'EXPIRED' and n.expired_at > '0002-01-01 00:00:00+00' and n.expired_at <= statement_timestamp()
      and (%(before)s::timestamptz is null or n.expired_at < %(before)s)
      and (%(since)s::timestamptz is null or n.expired_at >= %(since)s)
      and (%(within_ms)s::bigint is null or n.expired_at >= statement_timestamp() - %(within_ms)s * interval '1 millisecond')
), read as materialized (
    select f.id, f.name, f.state, f.at, {schema}.object_of(f.error) as error
    from (
        select l.* from failed l cross join stop s where s.at is null or l.at > s.at or not s.is_left_out
        union all
        select * from expired
    ) f
    where (%(name)s::text is null or f.name = %(name)s) and (%(queue)s::text is null or f.queue = %(queue)s)
      and (%(labels)s::text is null or f.labels @> %(labels)s::text::jsonb)
      and (%(label_keys)s::text[] is null or f.labels ?& %(label_keys)s::text[])
), found as (
    select
        r.id, r.name, r.state, r.at, coalesce(r.error ->> 'code', '') as code, coalesce(r.error ->> 'type', '') as type,
        case when r.at > statement_timestamp() - interval '24 hours' then floor(extract(epoch from statement_timestamp() - r.at) / 3600)::integer end
            as hours_ago
    from read r
), grouped as (
    select
        f.name, f.code, f.type, count(*) as count, count(*) filter (where f.state = 'EXPIRED') as expired, min(f.at) as first_at,
        max(f.at) as last_at, (array_agg(f.id order by f.at desc, f.id desc))[1] as example_id,
        array_agg(f.hours_ago) filter (where f.hours_ago is not null) as hours_ago
    from found f
    group by f.name, f.code, f.type
)
select
    left(g.name, 200), left(g.code, 200), left(g.type, 200), g.count, g.expired, g.first_at, g.last_at, g.example_id,
    left((select r.error ->> 'message' from read r where r.id = g.example_id limit 1), 2000),
    case when s.is_left_out then s.at + interval '1 microsecond' else s.at end as continue_before,
    g.hours_ago
from stop s
left join grouped g on true
order by g.last_at desc, g.name, g.code, g.type
limit %(limit)s
