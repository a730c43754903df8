-- End workflows: RUNNING -> COMPLETED | FAILED, CANCELLING -> CANCELLED. A workflow that COMPLETED without its output has an error instead
-- of a result. The outbox reports the end to the parent's node.
with asked as (
    select a.*
    from rows from (
        unnest(%(ids)s::text::uuid[], %(states)s::text::text[]), json_array_elements(%(results)s::text::json),
        json_array_elements(%(errors)s::text::json)
    ) as a (id, state, result, error)
), ended as (
    update {schema}.workflows w
    set state = a.state, ended_at = statement_timestamp(), result = case when a.state = 'COMPLETED' and a.error::text = 'null' then a.result end,
        error = nullif(a.error::text, 'null')::json
    from asked a
    where w.id = a.id and w.state in ('RUNNING', 'CANCELLING')
    returning w.id, w.parent_id, w.parent_node
), happened as (
    insert into {schema}.outbox (workflow_id, node) select e.parent_id, e.parent_node from ended e where e.parent_id is not null
), hint as materialized (
    select count(pg_notify(%(channel)s, 'd:' || e.id)) filter (where (select pg_notification_queue_usage()) < 0.5) as hints from ended e
)
select e.id, (select hints from hint) from ended e
