-- List the latest decided ticks of these schedules, latest first, without the states of their tasks. Those would be looked up in all partitions of
-- `history`. The primary key of `ticks` serves the statement.
select k.schedule, k.at, k.outcome, k.task_id, k.reason, k.detail, k.last_at, k.missed, k.decided_at, k.decided_by, null::text as state
from unnest(%(names)s::text[]) as asked (name)
cross join lateral (
    select o.* from {schema}.ticks o where o.schedule = asked.name order by o.at desc limit %(limit)s
) k
order by k.schedule, k.at desc
