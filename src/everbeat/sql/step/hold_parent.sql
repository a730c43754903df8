-- Lock a running task that is about to start a workflow. Requires the task's current claim_id; no row means a lost lease. Return whether
-- the task has a cancel request, the id for this step's workflow, and any id that an earlier attempt recorded. The id is derived as in
-- step/send_child, so that a repeated call does not start a second workflow.
select
    t.cancel_requested_at is not null as is_cancelled,
    encode(
        substr(uuid_send(t.id), 1, 6)
        || set_byte(set_byte(substr(sha256(uuid_send(t.id) || convert_to(%(step)s::text, 'UTF8')), 1, 10), 0, 112), 2, 128),
        'hex'
    )::uuid as child_id,
    (
        select (s.result #>> '{{}}')::uuid from {schema}.steps s
        where s.task_id = t.id and s.kind = 'child' and s.name = %(step)s::text
    ) as known
from {schema}.tasks t
where t.id = %(id)s and t.claim_id = %(claim_id)s and t.state = 'RUNNING'
for no key update of t
