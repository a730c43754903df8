-- What a worker with nothing to do asks: the milliseconds until the next task of these names and queues becomes due (null: none is
-- scheduled), whether workflows wait for somebody to move them on, and whether any suspect is due. The margin covers what became due
-- since the claim that found nothing (then the answer is negative); what is due later than in a day counts as due in a day. Of a serial line only the head can become due.
-- Marked tasks (needs_id) count only if they are of the groups in `marked`, which the code of this worker understands.
with recursive marked as materialized (
    select m.needs_id, m.queue, m.priority
    from json_to_recordset(%(marked)s::json) as m (needs_id uuid, name text, queue text, priority smallint)
    where m.name = any(%(names)s::text[])
), lane (queue, priority) as (
    (select queue, priority from {schema}.tasks where state = 'PENDING' and serial is null and needs_id is null order by queue, priority limit 1)
    union all
    select next_lane.queue, next_lane.priority
    from lane
    cross join lateral (
        select t.queue, t.priority from {schema}.tasks t
        where t.state = 'PENDING' and t.serial is null and t.needs_id is null and (t.queue, t.priority) > (lane.queue, lane.priority)
        order by t.queue, t.priority limit 1
    ) next_lane
), line (serial) as (
    (
        select serial from {schema}.tasks
        where serial is not null and state in ('PENDING', 'CLAIMED', 'RUNNING') order by serial limit 1
    )
    union all
    select next_line.serial
    from line
    cross join lateral (
        select t.serial from {schema}.tasks t
        where t.serial is not null and t.state in ('PENDING', 'CLAIMED', 'RUNNING') and t.serial > line.serial
        order by t.serial limit 1
    ) next_line
), soon (at) as (
    select first.enqueued_at
    from lane
    cross join lateral (
        select t.enqueued_at from {schema}.tasks t
        where t.state = 'PENDING' and t.serial is null and t.needs_id is null and t.queue = lane.queue and t.priority = lane.priority
          and t.enqueued_at > statement_timestamp() - %(margin_ms)s::bigint * interval '1 millisecond' and t.name = any(%(names)s::text[])
        order by t.enqueued_at limit 1
    ) first
    where %(queues)s::text[] is null or lane.queue = any(%(queues)s::text[])
    union all
    select first.enqueued_at
    from marked m
    cross join lateral (
        select t.enqueued_at from {schema}.tasks t
        where t.state = 'PENDING' and t.serial is null and t.needs_id = m.needs_id and t.queue = m.queue and t.priority = m.priority
          and t.enqueued_at > statement_timestamp() - %(margin_ms)s::bigint * interval '1 millisecond'
        order by t.enqueued_at limit 1
    ) first
    where %(queues)s::text[] is null or m.queue = any(%(queues)s::text[])
    union all
    select first.enqueued_at
    from line
    cross join lateral (
        select * from {schema}.tasks t
        where t.serial = line.serial and t.serial is not null and t.state in ('PENDING', 'CLAIMED', 'RUNNING')
        order by t.serial_at, t.id limit 1
    ) first
    where first.state = 'PENDING' and (first.needs_id is null or first.needs_id = any(array(select m.needs_id from marked m)))
      and first.enqueued_at > statement_timestamp() - %(margin_ms)s::bigint * interval '1 millisecond'
      and first.name = any(%(names)s::text[]) and (%(queues)s::text[] is null or first.queue = any(%(queues)s::text[]))
)
select
    extract(epoch from min(least(soon.at, statement_timestamp() + interval '1 day')) - statement_timestamp()) * 1000 as due_in_ms, exists (select from {schema}.outbox) as happened,
    exists (
        select from {schema}.tasks t
        where t.state = 'PENDING' and t.suspect and (t.needs_id is null or t.needs_id = any(array(select m.needs_id from marked m))) and t.enqueued_at <= statement_timestamp() and t.fence < 9223372036854775807 and t.attempt < 2147483647
          and t.name = any(%(names)s::text[])
          and (%(queues)s::text[] is null or t.queue = any(%(queues)s::text[]))
    ) as suspects
from soon
