-- Remove the results of completed tasks whose function stores results only for a time, which has passed: one step. The tasks themselves are
-- kept. A removed result leaves the index, so the next step begins at the start again. The first query walks the distinct times, because
-- each function has its own. Return true if another step is needed, and the number of removed results.
with recursive kept (ms) as (
    (
        select {schema}.kept_ms(t.policy) from {schema}.tasks t
        where t.state = 'COMPLETED' and t.workflow_id is null and t.result is not null and position('"keep_result_ms"' in t.policy::text) > 0
        order by {schema}.kept_ms(t.policy) limit 1
    )
    union all
    select (
        select {schema}.kept_ms(t.policy) from {schema}.tasks t
        where t.state = 'COMPLETED' and t.workflow_id is null and t.result is not null and position('"keep_result_ms"' in t.policy::text) > 0
          and {schema}.kept_ms(t.policy) > kept.ms
        order by {schema}.kept_ms(t.policy) limit 1
    )
    from kept where kept.ms is not null
), old as materialized (
    select due.id
    from kept
    cross join lateral (
        select t.id from {schema}.tasks t
        where t.state = 'COMPLETED' and t.workflow_id is null and t.result is not null and position('"keep_result_ms"' in t.policy::text) > 0
          and {schema}.kept_ms(t.policy) = kept.ms
          and t.completed_at < statement_timestamp()
              - case when kept.ms ~ '^[0-9]{{1,12}}$' then kept.ms::bigint end * interval '1 millisecond'
        order by t.completed_at
        limit %(limit)s
        for no key update skip locked
    ) due
    limit %(limit)s
), gone as (
    update {schema}.tasks t set result = null where t.id = any(array(select o.id from old o)) returning 1
)
select case when (select count(*) from gone) = %(limit)s then true end as next_after, (select count(*) from gone) as results
