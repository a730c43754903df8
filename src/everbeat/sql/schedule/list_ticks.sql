-- List the decided ticks of a schedule, latest first, with the current states of their tasks. The tasks are looked up together: so each
-- partition of `history` is read once, and not for each tick.
with decided as materialized (
    select o.schedule, o.at, o.outcome, o.task_id, o.reason, o.detail, o.last_at, o.missed, o.decided_at, o.decided_by
    from {schema}.ticks o
    where o.schedule = %(name)s and (%(before)s::timestamptz is null or o.at < %(before)s)
    order by o.at desc
    limit %(limit)s
), state_of as materialized (
    select t.id, t.state from {schema}.all_tasks t where t.id = any(array(select d.task_id from decided d))
)
select d.schedule, d.at, d.outcome, d.task_id, d.reason, d.detail, d.last_at, d.missed, d.decided_at, d.decided_by, s.state
from decided d
left join state_of s on s.id = d.task_id
order by d.at desc
