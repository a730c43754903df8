-- Return one schedule with its latest tick.
select {fragment/schedule_info}
from {schema}.schedules s
left join lateral (
    select o.schedule, o.at, o.outcome, o.task_id, o.reason, o.detail, o.last_at, o.missed, o.decided_at, o.decided_by
    from {schema}.ticks o where o.schedule = s.name order by o.at desc limit 1
) k on true
where s.name = %(name)s
