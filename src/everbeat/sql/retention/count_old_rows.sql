-- Count the rows that a retention pass would delete now, by table, without those of `history`. A null age deletes nothing. The statement reads whole tables and is
-- meant for an operator's dry run.
with age as materialized (
    select
        statement_timestamp() - %(terminal_hours)s * interval '1 hour' as terminal,
        statement_timestamp() - %(worker_hours)s * interval '1 hour' as worker,
        statement_timestamp() - %(beat_hours)s * interval '1 hour' as beat
), old_workflows as materialized (
    select w.id from {schema}.workflows w
    where w.ended_at < (select terminal from age) and (w.id < %(old_id)s or w.id > %(now_id)s)
      and not exists (select from {schema}.workflows p where p.id = w.parent_id and p.ended_at is null)
), old_tasks as materialized (
    select t.id from {schema}.tasks t
    where t.state in ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED')
      and greatest(t.completed_at, t.failed_at, t.cancelled_at, t.expired_at) < (select terminal from age)
      and (t.id < %(old_id)s or t.id > %(now_id)s)
      and not exists (
          select from {schema}.workflows w where w.id = t.workflow_id and not exists (select from old_workflows o where o.id = w.id)
      )
      and (
          t.batch_id is null
          or coalesce((select p.state from {schema}.tasks p where p.id = t.parent_id), '') not in ('PENDING', 'CLAIMED', 'RUNNING')
      )
), old_workers as materialized (
    select w.id from {schema}.workers w
    where w.ended_at < (select worker from age)
      and not exists (select from {schema}.tasks t where t.claimed_by_worker_id = w.id and t.state in ('CLAIMED', 'RUNNING'))
)
select
    (select count(*) from old_tasks) as tasks,
    (
        select count(*) from {schema}.attempts a
        where exists (select from old_tasks o where o.id = a.task_id)
           or (a.ended_at < (select terminal from age) and (a.task_id < %(old_id)s or a.task_id > %(now_id)s)
               and not exists (select from {schema}.tasks t where t.id = a.task_id))
    ) as attempts,
    (
        select count(*) from {schema}.recoveries r
        where exists (select from old_tasks o where o.id = r.task_id)
           or (r.noticed_at < (select terminal from age) and not exists (select from {schema}.tasks t where t.id = r.task_id))
    ) as recoveries,
    (
        select count(*) from {schema}.steps s
        where exists (select from old_tasks o where o.id = s.task_id)
           or (s.recorded_at < (select terminal from age) and (s.task_id < %(old_id)s or s.task_id > %(now_id)s)
               and not exists (select from {schema}.tasks t where t.id = s.task_id))
    ) as steps,
    (
        select count(*) from {schema}.signals s
        where exists (select from old_tasks o where o.id = s.target)
           or exists (select from old_workflows o where o.id = s.target)
           or (s.sent_at < (select terminal from age) and (s.id < %(old_id)s or s.id > %(now_id)s)
               and not exists (select from {schema}.tasks t where t.id = s.target)
               and not exists (select from {schema}.workflows w where w.id = s.target))
    ) as signals,
    (select count(*) from {schema}.beats b where b.sent_at < (select beat from age)) as beats,
    (select count(*) from {schema}.worker_states x where x.at < (select worker from age)) as worker_states,
    (select count(*) from old_workers) as workers,
    (
        select count(*) from {schema}.supervisors s
        where s.ended_at < (select worker from age)
          and not exists (
              select from {schema}.workers w
              where w.supervisor_id = s.id and not exists (select from old_workers o where o.id = w.id)
          )
    ) as supervisors,
    (select count(*) from old_workflows) as workflows,
    (select count(*) from {schema}.nodes n where exists (select from old_workflows o where o.id = n.workflow_id)) as nodes,
    (select count(*) from {schema}.edges e where exists (select from old_workflows o where o.id = e.workflow_id)) as edges,
    (select count(*) from {schema}.ticks k where k.decided_at < (select terminal from age)) as ticks,
    (
        select count(*) from {schema}.schedule_versions v
        where v.live_since < (select worker from age)
          and not exists (
              select from {schema}.workers w
              where w.schedule_owner = v.owner and w.schedule_version = v.version and not exists (select from old_workers o where o.id = w.id)
          )
    ) as schedule_versions,
    (
        select count(*) from {schema}.tasks t
        where t.state = 'COMPLETED' and t.workflow_id is null and t.result is not null and position('"keep_result_ms"' in t.policy::text) > 0
          and t.completed_at < statement_timestamp() - case
              when {schema}.kept_ms(t.policy) ~ '^[0-9]{{1,12}}$' then {schema}.kept_ms(t.policy)::bigint
          end * interval '1 millisecond'
    ) as results
