-- List recoveries for tracers: the latest recovery of each of these tasks by this process, with the carrier of the task. The recoveries are
-- found by recoveries_by_task, the attempts and the tasks by their primary keys.
select
    r.task_id, r.name, r.queue, r.attempt, r.fence, r.worker_id, r.hostname, r.pid, r.action, r.cause, r.noticed_by, r.recovered_by,
    a.started_at, r.last_beat_at, r.noticed_at, t.workflow_id, case when octet_length(r.certificate::text) <= 100000 then (r.certificate -> 'data')::text end,
    case when octet_length(t.context::text) <= 16384 then t.context::text end
from unnest(%(ids)s::text::uuid[]) as asked (id)
cross join lateral (
    select * from {schema}.recoveries r where r.task_id = asked.id and r.recovered_by = %(recovered_by)s order by r.fence desc limit 1
) r
left join {schema}.tasks t on t.id = r.task_id
left join {schema}.attempts a on a.task_id = r.task_id and a.attempt = r.attempt and a.claim_id = r.claim_id and r.was = 'RUNNING'
