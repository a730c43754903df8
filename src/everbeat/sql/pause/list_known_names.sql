-- List the names of task functions or queues from registered workers, live tasks, the attempts of ten minutes and the recoveries of the last
-- day. An operator can pause only names from this list. No index has the order of names. So the statement reads the first 100 tasks of each
-- lane. It reads the first task of up to 10,000 lines and groups of marked tasks. It also reads up to 100,000 tasks in flight, rows of rates
-- and recoveries. The primary key of rates serves the condition on its time.
with recursive {fragment/lanes}, {fragment/marked_lanes}, {fragment/serial_lines}
select distinct known.name from (
    select front.name, l.queue
    from lane l
    cross join lateral (
        select t.name from {schema}.tasks t
        where t.state = 'PENDING' and t.serial is null and t.needs_id is null and t.queue = l.queue and t.priority = l.priority
        order by t.enqueued_at, t.id limit 100
    ) front
    union all
    select front.name, l.queue
    from (select l.* from marked_lane l limit 10000) l
    cross join lateral (
        select t.name from {schema}.tasks t
        where t.state = 'PENDING' and t.serial is null and t.needs_id = l.needs_id and t.queue = l.queue and t.priority = l.priority
        order by t.enqueued_at, t.id limit 1
    ) front
    union all
    select head.name, head.queue
    from (select l.serial from serial_line l limit 10000) l
    cross join lateral (
        select t.name, t.queue from {schema}.tasks t where t.state = 'PENDING' and t.serial = l.serial order by t.serial_at, t.id limit 1
    ) head
    union all
    (
        select t.name, t.queue from {schema}.tasks t
        where t.state in ('CLAIMED', 'RUNNING') order by t.claimed_by_worker_id limit 100000
    )
    union all
    select task.name, null from {schema}.workers w
    cross join lateral (select {schema}.object_of(w.metadata) -> 'tasks' as names) told
    cross join lateral jsonb_array_elements_text(case when jsonb_typeof(told.names) = 'array' then told.names end) as task (name)
    union all
    select null, queue.name from {schema}.workers w cross join lateral unnest(w.queues) as queue (name)
    union all
    (
        select r.name, r.queue from {schema}.rates r
        where r.seconds = 60 and r.at > statement_timestamp() - interval '11 minutes' order by r.at desc limit 100000
    )
    union all
    (
        select r.name, r.queue from {schema}.recoveries r
        where r.noticed_at > statement_timestamp() - interval '1 day' order by r.noticed_at desc limit 100000
    )
) seen
cross join lateral (select case %(kind)s when 'task' then seen.name else seen.queue end as name) known
where known.name is not null
order by known.name
