-- Send the notifications about many cancelled tasks. `ended` are those that are CANCELLED, with their earlier state as `was` and their workflow or
-- batch, which can continue, as `whole_id`. `asked` are those that are asked to stop.
hint as materialized (
    select count(pg_notify(%(channel)s, payload)) filter (where (select pg_notification_queue_usage()) < 0.5) as hints from (
        select 'd:' || string_agg(e.id::text, ',') as payload
        from (select id, (row_number() over () - 1) / 200 as part from ended) e group by e.part
        union
        select 't:' || left(e.queue, 1000) from ended e where e.serial is not null
        union
        select 'w' from ended e where e.whole_id is not null
        union
        select 'l:' || string_agg(e.id::text, ',')
        from (select id, (row_number() over () - 1) / 200 as part from ended where was = 'CLAIMED') e group by e.part
        union
        select 'c:' || a.id from asked a
    ) hints
)
