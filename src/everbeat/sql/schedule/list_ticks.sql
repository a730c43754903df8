-- List the decided ticks of a schedule, latest first, with the current states of their tasks.
select k.schedule, k.at, k.outcome, k.task_id, k.reason, k.detail, k.last_at, k.missed, k.decided_at, k.decided_by,
    coalesce(t.state, (select h.state from {schema}.history h where h.id = k.task_id)) as state
from (
    select o.schedule, o.at, o.outcome, o.task_id, o.reason, o.detail, o.last_at, o.missed, o.decided_at, o.decided_by
    from {schema}.ticks o
    where o.schedule = %(name)s and (%(before)s::timestamptz is null or o.at < %(before)s)
    order by o.at desc
    limit %(limit)s
) k
left join {schema}.tasks t on t.id = k.task_id
order by k.at desc
