-- Store the items that running tasks have emitted, and announce them to readers. Requires each attempt's current claim_id; the items of an
-- attempt without its lease are not stored, and its id is missing in the reply. The shared lock on the task's row conflicts with every change of
-- the lease, so a recovery comes before or after the whole statement. The row itself does not change. The worker numbers the items, so a
-- repeated call stores nothing twice. Lock order: tasks by id, then inserts.
with held as materialized (
    select t.id, t.claim_id, t.attempt from {schema}.tasks t
    where t.id = any(%(ids)s::uuid[]) and t.claim_id = any(%(claim_ids)s::uuid[]) and t.state || '' = 'RUNNING'
    order by t.id
    for share
), stored as (
    insert into {schema}.stream_items (task_id, name, number, attempt, value)
    select h.id, i.name, i.number, h.attempt, i.value::json
    from held h
    join unnest(%(owners)s::uuid[], %(names)s::text[], %(numbers)s::integer[], %(values)s::text[]) as i (claim_id, name, number, value)
        on i.claim_id = h.claim_id
    on conflict do nothing
)
select
    array_agg(h.claim_id) as claim_ids,
    (select count(pg_notify(%(channel)s::text, hint.payload)) filter (where (select pg_notification_queue_usage()) < 0.5)
     from (select 'e:' || string_agg(l.id::text, ',') as payload from held l having count(*) > 0) hint) as hints
from held h
