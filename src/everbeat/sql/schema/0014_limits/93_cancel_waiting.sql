-- Cancel these tasks if they still wait, and notify those that wait for their results. A task that another transaction has locked stays.
create function {schema}.cancel_waiting(p_ids uuid[], p_message text, p_channel text) returns void language plpgsql
    set enable_seqscan = off set enable_mergejoin = off set enable_hashjoin = off set plan_cache_mode = force_generic_plan as $$
declare
    hints bigint;
begin
    with locked as materialized (
        select t.id from unnest(p_ids) as asked (id)
        cross join lateral (
            select t.id from {schema}.tasks t where t.id = asked.id and t.state = 'PENDING' limit 1 for no key update skip locked
        ) t
    ), cancelled as (
        update {schema}.tasks t
        set state = 'CANCELLED', cancelled_at = statement_timestamp(), next_retry_at = null,
            error = json_build_object('code', 'TASK_CANCELLED', 'message', p_message)
        from locked l where t.id = l.id
        returning t.id, t.workflow_id
    )
    select count(pg_notify(p_channel, hint.payload)) into hints
    from (
        select 'd:' || string_agg(c.id::text, ',') as payload
        from (select id, (row_number() over () - 1) / 200 as part from cancelled) c group by c.part
        union
        select 'w' from cancelled c where c.workflow_id is not null
    ) hint
    where p_channel is not null and (select pg_notification_queue_usage()) < 0.5;
end
$$
