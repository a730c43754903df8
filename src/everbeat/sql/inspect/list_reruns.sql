-- List when the code of recovered tasks began again, in seconds since the dead holder's last sign of life. Each lease has a row.
-- `after_s` is null if the code has not begun. `has_ended`: the task has ended or is not in `tasks`, so it will not.
-- The primary keys of tasks and attempts serve it, and recoveries_by_task.
select
    asked.task_id, asked.fence,
    extract(epoch from again.started_at - dead.at)::double precision as after_s,
    t.id is null or t.state in ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED') as has_ended
from unnest(%(task_ids)s::uuid[], %(fences)s::bigint[]) as asked (task_id, fence)
left join {schema}.tasks t on t.id = asked.task_id
left join lateral (
    select r.noticed_at - coalesce(r.noticed_after_ms, 0) * interval '1 millisecond' as at
    from {schema}.recoveries r
    where r.task_id = asked.task_id and r.fence = asked.fence
    limit 1
) dead on true
left join lateral (
    select later.started_at
    from (
        select a.started_at from {schema}.attempts a where a.task_id = asked.task_id and a.fence > asked.fence
        union all
        select t.started_at where t.fence > asked.fence and t.started_at is not null
    ) later
    order by later.started_at
    limit 1
) again on true
