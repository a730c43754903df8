-- Group the tasks that FAILED or EXPIRED by name, error code and class, the latest group first. The statement examines a limited number
-- of tasks (`most`). It reads the tasks that failed last through an index (tasks_failed, history_failed). Of the other tasks, it reads the
-- newest, through the primary key. An escaped NUL or surrogate that was stored by hand cannot be read as text.
-- Return one row without a group if there is none. `continue_before`: earlier failures were not examined. Many tasks can fail at the same
-- moment, so those of the earliest moment are left to the next call, unless there are no others.
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
), found as (
    select f.id, f.name, f.state, f.at, coalesce(e.error ->> 'code', '') as code, coalesce(e.error ->> 'type', '') as type,
        coalesce(e.error ->> 'message', '') as message
    from (
        select l.* from failed l cross join stop s where s.at is null or l.at > s.at or not s.is_left_out
        union all
        select * from expired
    ) f
    cross join lateral (select case when f.error::text !~* E'\\\\u(0000|d[89a-f])' then f.error end as error) e
    where (%(name)s::text is null or f.name = %(name)s) and (%(queue)s::text is null or f.queue = %(queue)s)
      and (%(labels)s::text is null or f.labels @> %(labels)s::text::jsonb)
      and (%(label_keys)s::text[] is null or f.labels ?& %(label_keys)s::text[])
), grouped as (
    select
        f.name, f.code, f.type, count(*) as count, count(*) filter (where f.state = 'EXPIRED') as expired, min(f.at) as first_at,
        max(f.at) as last_at, (array_agg(f.id order by f.at desc, f.id desc))[1] as example_id
    from found f
    group by f.name, f.code, f.type
)
select
    left(g.name, 200), left(g.code, 200), left(g.type, 200), g.count, g.expired, g.first_at, g.last_at, g.example_id,
    left((select f.message from found f where f.id = g.example_id limit 1), 2000),
    case when s.is_left_out then s.at + interval '1 microsecond' else s.at end as continue_before
from stop s
left join grouped g on true
order by g.last_at desc, g.name, g.code, g.type
limit %(limit)s
