-- The id of the task that handles a failure. It depends on the failed task, its fence and the time of the failure. Like a UUIDv7, it begins
-- with the time, because the ids of tasks are ordered by time.
create or replace function {schema}.handler_id(p_task uuid, p_fence bigint, p_failed_at timestamptz) returns uuid language sql stable as $$
    select encode(
        substr(int8send((extract(epoch from coalesce({schema}.plausible(p_failed_at), statement_timestamp())) * 1000)::bigint), 3, 6)
        || set_byte(set_byte(substr(sha256(uuid_send(p_task) || int8send(p_fence)), 1, 10), 0, 112), 2, 128),
        'hex'
    )::uuid
$$
