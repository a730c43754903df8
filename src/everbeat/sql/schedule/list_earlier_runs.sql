-- List the latest run of each of these schedules before a tick, with its state, from the 24 ticks before it. The primary keys serve the
-- statement: that of `ticks` finds the ticks, and those of `tasks` and `history` find one task for each schedule.
select
    k.schedule, k.at, k.outcome, k.task_id, k.reason, k.detail, k.last_at, k.missed, k.decided_at, k.decided_by,
    coalesce(
        (select t.state from {schema}.tasks t where t.id = k.task_id), (select h.state from {schema}.history h where h.id = k.task_id)
    ) as state
from unnest(%(names)s::text[], %(befores)s::timestamptz[]) as asked (name, before)
cross join lateral (
    select e.*
    from (
        select o.* from {schema}.ticks o where o.schedule = asked.name and o.at < asked.before order by o.at desc limit 24
    ) e
    where e.task_id is not null
    order by e.at desc
    limit 1
) k
