-- Send the tasks of ready nodes: PENDING | READY -> ENQUEUED, and nothing -> PENDING. A task's id is derived from its workflow, node and
-- iteration. The id begins with the workflow's time, as in a UUIDv7. So repeating a send does not send a task twice. A node that starts
-- again (after a retry of the workflow) continues from the checkpoint and the recorded steps of its earlier task. If the earlier task ended
-- because a wait timed out, that wait is not carried over. The new task has no deadline if the earlier one EXPIRED or FAILED, as after an
-- operator's retry of a task. A delay counts once: it does not begin again for a task that was withdrawn or failed. If the earlier task completed, its input might have changed. The new task then starts without the steps (a
-- completed task has no checkpoint) and has no deadline. The task inherits the workflow's labels and its carrier. The state is compared as an expression, so that each node is found by its key and
-- not among all open nodes.
with asked as materialized (
    select a.workflow_id, a.number, nullif(a.args::text, 'null')::json as args
    from rows from (
        unnest(%(ids)s::text::uuid[], %(numbers)s::text::integer[]), json_array_elements(%(args)s::text::json)
    ) as a (workflow_id, number, args)
), moved as (
    update {schema}.nodes n
    set state = 'ENQUEUED', enqueued_at = statement_timestamp(), iteration = n.iteration + 1, ended_at = null, error = null,
        task_id = encode(
            substr(uuid_send(n.workflow_id), 1, 6)
            || set_byte(
                set_byte(substr(sha256(uuid_send(n.workflow_id) || int4send(n.number) || int4send(n.iteration + 1)), 1, 10), 0, 112), 2, 128
            ),
            'hex'
        )::uuid
    from asked a
    where n.workflow_id = a.workflow_id and n.number = a.number and n.state || '' in ('PENDING', 'READY') and n.kind = 'task'
    returning n.workflow_id, n.number, n.iteration, n.task_id, n.task, n.queue, n.priority, n.options, coalesce(a.args, n.args) as args
), before as materialized (
    select m.task_id, t.id, t.state, t.enqueued_at, t.checkpoint, t.error, t.state = 'COMPLETED' and t.result is not null as is_whole
    from moved m
    join {schema}.tasks t on t.id = encode(
        substr(uuid_send(m.workflow_id), 1, 6)
        || set_byte(
            set_byte(substr(sha256(uuid_send(m.workflow_id) || int4send(m.number) || int4send(m.iteration - 1)), 1, 10), 0, 112), 2, 128
        ),
        'hex'
    )::uuid
    where m.iteration > 1
), kept as (
    insert into {schema}.steps (task_id, kind, name, state, result, due_at, signal_id, attempt, begun_at, recorded_at, digest)
    select b.task_id, s.kind, s.name, s.state, s.result, s.due_at, s.signal_id, s.attempt, s.begun_at, s.recorded_at, s.digest
    from before b
    join {schema}.steps s on s.task_id = b.id
    where not b.is_whole and (s.state <> 'TIMED_OUT' or b.error is null or b.error::text !~ '^[{{]"code": ?"EVENT_TIMEOUT"' or exists (
        select from {schema}.steps later
        where later.task_id = s.task_id and later.kind = 'event' and later.state = 'TIMED_OUT' and later.recorded_at > s.recorded_at
    ))
    on conflict do nothing
), due as materialized (
    select
        m.task_id,
        case
            when b.task_id is not null then greatest(statement_timestamp(), b.enqueued_at)
            else statement_timestamp() + (m.options ->> 'delay_ms')::bigint * interval '1 millisecond'
        end as at
    from moved m
    left join before b on b.task_id = m.task_id and not b.is_whole
    where m.options -> 'delay_ms' is not null
), sent as (
    insert into {schema}.tasks (
        id, name, queue, priority, args, policy, flags, good_until, serial, sent_at, enqueued_at, serial_at, workflow_id, node, checkpoint,
        gates, costs, labels, context
    )
    select
        m.task_id, m.task, m.queue, m.priority, m.args, (m.options ->> 'policy')::json, (m.options ->> 'flags')::json,
        case when not exists (select from before b where b.task_id = m.task_id and (b.state in ('EXPIRED', 'FAILED') or b.is_whole)) then (m.options ->> 'good_until')::timestamptz end, m.options ->> 'serial', statement_timestamp(),
        coalesce(d.at, statement_timestamp()), case when m.options ->> 'serial' is not null then coalesce(d.at, statement_timestamp()) end, m.workflow_id, m.number,
        (select b.checkpoint from before b where b.task_id = m.task_id),
        case when m.options -> 'gates' is not null then {schema}.gates_of(m.options -> 'gates', m.args) end,
        case when m.options -> 'costs' is not null then array(select json_array_elements_text(m.options -> 'costs')::integer) end,
        coalesce(label.inherited || label.own, label.inherited, label.own), w.context
    from moved m
    left join due d on d.task_id = m.task_id
    left join {schema}.workflows w on w.id = m.workflow_id
    cross join lateral (select w.labels as inherited, (m.options ->> 'labels')::jsonb as own) label
    order by m.task_id
    on conflict (id) do nothing
    returning queue
), hint as materialized (
    select count(pg_notify(%(channel)s, 't:' || left(queue, 1000))) filter (where (select pg_notification_queue_usage()) < 0.5) as hints from (select distinct queue from sent) queues
    where exists (select from {schema}.workers w where w.listens and w.ended_at is null)
)
select count(*) as moved, (select hints from hint) as hints from moved
