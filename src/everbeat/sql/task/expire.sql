-- Expires tasks whose good_until passed: PENDING -> EXPIRED, a bounded batch, oldest deadline first. No attempt row: no code ran.
with late as materialized (
    select t.id from {schema}.tasks t
    where t.state = 'PENDING' and t.good_until <= statement_timestamp()
    order by t.good_until
    limit %(limit)s
    for no key update skip locked
), expired as (
    update {schema}.tasks t
    set state = 'EXPIRED', expired_at = statement_timestamp(), next_retry_at = null,
        error = case when t.attempt = 0 then json_build_object('code', 'TASK_EXPIRED', 'message', 'good_until passed before the task started')
                     else json_build_object(
                         'code', 'TASK_EXPIRED', 'message', 'good_until passed before the task started again, after attempt ' || t.attempt,
                         'data', json_build_object('last_error', t.error)) end
    from late l where t.id = l.id
    returning t.id, t.queue, t.serial, t.workflow_id
), hint as materialized (
    select count(pg_notify(%(channel)s, payload)) filter (where (select pg_notification_queue_usage()) < 0.5) as hints from (
        select 'd:' || string_agg(e.id::text, ',') as payload
        from (select id, (row_number() over () - 1) / 200 as part from expired) e group by e.part
        union
        select 't:' || left(e.queue, 1000) from expired e where e.serial is not null
        union
        select 'w' from expired e where e.workflow_id is not null
    ) hints
)
select e.id, (select hints from hint) as hints from expired e
