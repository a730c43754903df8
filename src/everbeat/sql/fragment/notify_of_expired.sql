-- Send the notifications about expired tasks: for the tasks themselves, for queues whose serial lines can continue, and for workflows and batches.
hint as materialized (
    select count(pg_notify(%(channel)s, payload)) filter (where (select pg_notification_queue_usage()) < 0.5) as hints from (
        select 'd:' || string_agg(e.id::text, ',') as payload
        from (select id, (row_number() over () - 1) / 200 as part from expired) e group by e.part
        union
        select 't:' || left(e.queue, 1000) from expired e where e.serial is not null
        union
        select 'w' from expired e where e.whole_id is not null
    ) hints
)
