-- Assign a child workflow to a node: PENDING | READY -> ENQUEUED. The child's id is derived in the same way as the ids of tasks.
update {schema}.nodes n
set state = 'ENQUEUED', enqueued_at = statement_timestamp(), iteration = n.iteration + 1, ended_at = null, error = null,
    task_id = encode(
        substr(uuid_send(n.workflow_id), 1, 6)
        || set_byte(
            set_byte(substr(sha256(uuid_send(n.workflow_id) || int4send(n.number) || int4send(n.iteration + 1)), 1, 10), 0, 112), 2, 128
        ),
        'hex'
    )::uuid
where n.workflow_id = %(id)s and n.number = %(number)s and n.state in ('PENDING', 'READY') and n.kind = 'workflow'
returning n.task_id
