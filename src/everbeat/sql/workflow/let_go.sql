-- Children of locked workflows that run, and that were paused with them: PAUSED -> RUNNING.
with freed as (
    update {schema}.workflows w
    set state = 'RUNNING', paused_at = null, is_held = false
    from {schema}.nodes n
    where n.workflow_id = any(%(ids)s::text::uuid[]) and n.kind = 'workflow' and n.state = 'ENQUEUED' and w.id = n.task_id
      and w.state = 'PAUSED' and w.is_held
    returning w.id
)
insert into {schema}.outbox (workflow_id, node) select f.id, null from freed f
