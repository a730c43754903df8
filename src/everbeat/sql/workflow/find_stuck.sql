-- Return a page of live workflows with an overdue transition, ordered by id. Workflows with an outbox entry younger than the grace period
-- are advancing. An entry more than a second in the future counts as old, because the clock has been set back since. Paused workflows are
-- waiting for an operator, and cancelled ones enqueue nothing. NODE_GONE: another node is waiting for a node whose row was deleted.
-- NOTHING_MOVES: open nodes are waiting only for each other.
with page as materialized (
    select w.id, w.name, w.state
    from {schema}.workflows w
    where w.state in ('RUNNING', 'PAUSED', 'CANCELLING') and w.id > %(after)s and (%(only)s::uuid is null or w.id = %(only)s::uuid)
    order by w.id
    limit %(limit)s
), still as materialized (
    select p.id, p.name, p.state from page p
    where not exists (
        select from {schema}.outbox o
        where o.workflow_id = p.id and o.at > statement_timestamp() - %(grace_ms)s::bigint * interval '1 millisecond'
          and o.at <= statement_timestamp() + interval '1 second'
    )
), found as materialized (
    select s.id, n.number, n.name, n.task_id, 'TASK_ENDED' as what
    from still s
    join {schema}.nodes n on n.workflow_id = s.id and n.state = 'ENQUEUED' and n.kind = 'task'
    left join {schema}.tasks t on t.id = n.task_id
    where t.id is null or t.state in ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED')
    union all
    select s.id, n.number, n.name, n.task_id, 'CHILD_ENDED'
    from still s
    join {schema}.nodes n on n.workflow_id = s.id and n.state = 'ENQUEUED' and n.kind = 'workflow'
    left join {schema}.workflows w on w.id = n.task_id
    where w.id is null or w.state in ('COMPLETED', 'FAILED', 'CANCELLED')
    union all
    select s.id, n.number, n.name, n.task_id, 'MEMBERS_ENDED'
    from still s
    join {schema}.nodes n on n.workflow_id = s.id and n.state = 'ENQUEUED' and n.kind = 'map'
    where not exists (
        select from {schema}.nodes m
        where m.workflow_id = s.id and m.member_of = n.number and m.state in ('PENDING', 'READY', 'ENQUEUED')
    )
    union all
    select s.id, n.number, n.name, n.task_id, 'NOT_ENQUEUED'
    from still s
    join {schema}.nodes n on n.workflow_id = s.id and n.state = 'READY'
    where s.state = 'RUNNING'
    union all
    select s.id, n.number, n.name, n.task_id, 'NOT_RESOLVED'
    from still s
    join {schema}.nodes n on n.workflow_id = s.id and n.state = 'PENDING'
    where s.state <> 'CANCELLING' and not exists (
        select from {schema}.edges e
        left join {schema}.nodes p on p.workflow_id = e.workflow_id and p.number = e.parent
        where e.workflow_id = s.id and e.child = n.number
          and case when p.number is null then e.state = 'OPEN' else p.state in ('PENDING', 'READY', 'ENQUEUED') end
    )
    union all
    select distinct s.id, e.parent, '#' || e.parent, null::uuid, 'NODE_GONE'
    from still s
    join {schema}.nodes n on n.workflow_id = s.id and n.state = 'PENDING'
    join {schema}.edges e on e.workflow_id = s.id and e.child = n.number and e.state = 'OPEN'
    left join {schema}.nodes p on p.workflow_id = e.workflow_id and p.number = e.parent
    where s.state <> 'CANCELLING' and p.number is null
    union all
    select s.id, n.number, n.name, n.task_id, 'NOT_CANCELLED'
    from still s
    join {schema}.nodes n on n.workflow_id = s.id and n.state in ('PENDING', 'READY', 'ENQUEUED')
    left join {schema}.tasks t on n.kind = 'task' and n.state = 'ENQUEUED' and t.id = n.task_id
    left join {schema}.workflows w on n.kind = 'workflow' and n.state = 'ENQUEUED' and w.id = n.task_id
    where s.state = 'CANCELLING' and (
        n.state <> 'ENQUEUED' or t.state in ('PENDING', 'CLAIMED') or t.state = 'RUNNING' and t.cancel_requested_at is null
        or w.state in ('RUNNING', 'PAUSED')
    )
    union all
    select s.id, n.number, n.name, n.task_id, 'CHILD_HELD'
    from still s
    join {schema}.nodes n on n.workflow_id = s.id and n.state = 'ENQUEUED' and n.kind = 'workflow'
    join {schema}.workflows w on w.id = n.task_id and w.state = 'PAUSED' and w.is_held
    where s.state = 'RUNNING'
    union all
    select s.id, null, null, null, 'NOT_FINISHED'
    from still s
    where s.state <> 'PAUSED' and not exists (
        select from {schema}.nodes n where n.workflow_id = s.id and n.state in ('PENDING', 'READY', 'ENQUEUED')
    )
), motionless as materialized (
    select s.id
    from still s
    where s.state = 'RUNNING'
      and exists (select from {schema}.nodes n where n.workflow_id = s.id and n.state in ('PENDING', 'READY', 'ENQUEUED'))
      and not exists (
          select from {schema}.nodes n
          where n.workflow_id = s.id and n.state in ('PENDING', 'READY', 'ENQUEUED') and n.state <> 'PENDING'
      )
      and not exists (select from found f where f.id = s.id)
)
select 'found' as kind, f.id, s.name, f.number, f.name as node, f.task_id, f.what from found f join still s on s.id = f.id
union all
select 'found', s.id, s.name, null, null, null, 'NOTHING_MOVES' from motionless m join still s on s.id = m.id
union all
select 'page', max_id.id, null, null, null, null, null
from (select p.id from page p order by p.id desc limit 1) max_id
where (select count(*) from page) = %(limit)s
