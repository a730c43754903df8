-- List the names of task functions or queues from registered workers, live tasks and the recoveries of the last day. An operator can pause
-- only names from this list. There is no index by name, so the statement reads all live tasks.
select distinct known.name from (
    select t.name as name, t.queue as queue from {schema}.tasks t where t.state in ('PENDING', 'CLAIMED', 'RUNNING')
    union all
    select task.name, null from {schema}.workers w
    cross join lateral (select {schema}.object_of(w.metadata) -> 'tasks' as names) told
    cross join lateral jsonb_array_elements_text(case when jsonb_typeof(told.names) = 'array' then told.names end) as task (name)
    union all
    select null, queue.name from {schema}.workers w cross join lateral unnest(w.queues) as queue (name)
    union all
    select r.name, r.queue from {schema}.recoveries r where r.noticed_at > statement_timestamp() - interval '1 day'
) seen
cross join lateral (select case %(kind)s when 'task' then seen.name else seen.queue end as name) known
where known.name is not null
order by known.name
