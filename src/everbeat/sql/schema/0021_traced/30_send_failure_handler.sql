-- Send the failure handler of a task: nothing -> PENDING, in the transaction in which the task fails or expires. The policy of the task
-- contains all options of the handler, and the task its labels and its carrier. A handler has no handler, because its own policy contains none.
-- A policy or an error that was changed by hand must not prevent the failure. Such a handler is left out, and `everbeat doctor` reports it.
-- Errors that have other causes, such as a deadlock, abort the statement, which is then repeated.
-- The workers are notified, unless the name of the channel is a digest, which is the case for a schema with a long name.
-- The function sends no notification while PostgreSQL's notification queue is at least half full, because a full queue makes commits fail.
create or replace function {schema}.send_failure_handler() returns trigger language plpgsql as $$
declare
    v_handler json;
    v_args json;
    v_failed_at timestamptz := case new.state when 'FAILED' then new.failed_at else new.expired_at end;
    v_channel text := 'everbeat_' || tg_table_schema;
begin
    v_handler := new.policy -> 'on_failure';
    if json_typeof(v_handler) is distinct from 'object' then
        return null;
    end if;
    v_args := json_build_object(
        v_handler ->> 'parameter',
        json_build_object(
            'task_id', new.id, 'name', new.name, 'queue', new.queue, 'state', new.state,
            'error', case
                when new.error is null then json_build_object('code', 'RESULT_NOT_AVAILABLE', 'message', 'No error is stored.')
                when octet_length(new.error::text) <= 100000 then new.error
                else json_build_object(
                    'code', new.error ->> 'code', 'message', new.error ->> 'message', 'type', new.error ->> 'type',
                    'traceback', new.error ->> 'traceback'
                )
            end,
            'data_omitted', coalesce(octet_length(new.error::text) > 100000, false),
            'attempt', new.attempt, 'fence', new.fence, 'failed_at', coalesce({schema}.plausible(v_failed_at), statement_timestamp()),
            'key', coalesce(new.key, new.unique_key), 'labels', new.labels, 'workflow_id', new.workflow_id,
            'node', (select n.name from {schema}.nodes n where n.workflow_id = new.workflow_id and n.number = new.node),
            'arguments', case when octet_length(new.args::text) <= 100000 then new.args end,
            'arguments_omitted', octet_length(new.args::text) > 100000
        )
    );
    insert into {schema}.tasks (
        id, name, queue, priority, args, policy, flags, serial, sent_at, enqueued_at, serial_at, gates, costs, labels, context
    )
    values (
        {schema}.handler_id(new.id, new.fence, v_failed_at), v_handler ->> 'name', v_handler ->> 'queue',
        coalesce((v_handler ->> 'priority')::smallint, 0), v_args, coalesce(v_handler ->> 'policy', '{{}}')::json,
        (v_handler ->> 'flags')::json, v_handler ->> 'serial', statement_timestamp(), statement_timestamp(),
        case when v_handler ->> 'serial' is not null then statement_timestamp() end,
        case when v_handler -> 'gates' is not null then {schema}.gates_of(v_handler -> 'gates', v_args) end,
        case when v_handler -> 'costs' is not null then array(select json_array_elements_text(v_handler -> 'costs')::integer) end,
        new.labels, new.context
    )
    on conflict do nothing;
    if found and octet_length(v_channel) <= 63 then
        perform pg_notify(v_channel, 't:' || left(v_handler ->> 'queue', 1000))
        where (select pg_notification_queue_usage()) < 0.5
          and exists (select from {schema}.workers w where w.listens and w.ended_at is null);
    end if;
    return null;
exception
    when data_exception or integrity_constraint_violation or program_limit_exceeded or syntax_error_or_access_rule_violation then
        raise log 'everbeat: the failure handler of task % was not sent: %', new.id, sqlerrm;
        return null;
end
$$
