-- List schedules in the order of their names, each with its latest tick.
select {fragment/schedule_info}
from {schema}.schedules s
left join lateral (
    select o.schedule, o.at, o.outcome, o.task_id, o.reason, o.detail, o.last_at, o.missed, o.decided_at, o.decided_by
    from {schema}.ticks o where o.schedule = s.name order by o.at desc limit 1
) k on true
where (%(after)s::text is null or s.name > %(after)s)
  and (%(prefix)s::text is null or starts_with(s.name, %(prefix)s))
  and (%(task)s::text is null or s.task = %(task)s)
  and (%(owner)s::text is null or s.owner = %(owner)s)
  and (%(state)s::text is null or %(state)s = case
        when s.ended_at is not null then 'ENDED' when s.retired_at is not null then 'RETIRED' when s.paused_at is not null then 'PAUSED'
        else 'ACTIVE'
    end)
order by s.name
limit %(limit)s
