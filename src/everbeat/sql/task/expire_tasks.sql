-- Expire a limited batch of tasks whose good_until has passed, earliest deadline first: PENDING -> EXPIRED. No code ran, so there is no
-- attempt row. The error names the last attempt in which code ran. An attempt that was RELEASED before its code began does not count.
with late as materialized (
    select t.id from {schema}.tasks t
    where t.state = 'PENDING' and t.good_until <= statement_timestamp()
    order by t.good_until
    limit %(limit)s
    for no key update skip locked
), expired as (
    update {schema}.tasks t
    set state = 'EXPIRED', expired_at = statement_timestamp(), next_retry_at = null,
        error = coalesce(
            (
                select json_build_object(
                    'code', 'TASK_EXPIRED', 'message', 'good_until passed before the task started again, after attempt ' || a.attempt,
                    'data', json_build_object('last_error', a.error))
                from {schema}.attempts a
                where a.task_id = t.id and a.outcome <> 'RELEASED'
                order by a.attempt desc
                limit 1
            ),
            json_build_object('code', 'TASK_EXPIRED', 'message', 'good_until passed before the task started')
        )
    from late l where t.id = l.id
    returning t.id, t.queue, t.name, t.serial, coalesce(t.workflow_id, t.batch_id) as whole_id
), {fragment/notify_of_expired}
select e.id, e.queue, e.name, (select hints from hint) as hints from expired e
