-- Count the PENDING tasks of a queue, including scheduled ones, up to a limit. Each part reads a limited number of entries of one index, so
-- the cost does not grow with the queue. Serial lines and marked tasks have no index by queue, so at most ten times the limit of their
-- entries are read. The count can therefore be too low, but never too high. The order makes the planner read an index even if most rows
-- match. A scan of the table would also read the rows of tasks that have ended.
select (
    select count(*) from (
        select 1 from {schema}.tasks t
        where t.state = 'PENDING' and t.serial is null and t.needs_id is null and t.queue = %(queue)s
        order by t.priority, t.enqueued_at, t.id
        limit %(limit)s
    ) plain
) + (
    select count(*) from (
        select t.queue, t.state from {schema}.tasks t
        where t.serial is not null and t.state in ('PENDING', 'CLAIMED', 'RUNNING')
        order by t.serial, t.serial_at, t.id
        limit 10 * %(limit)s::bigint
    ) line
    where line.state = 'PENDING' and line.queue = %(queue)s
) + (
    select count(*) from (
        select t.queue from {schema}.tasks t
        where t.state = 'PENDING' and t.serial is null and t.needs_id is not null
        order by t.needs_id, t.queue, t.priority, t.enqueued_at, t.id
        limit 10 * %(limit)s::bigint
    ) marked
    where marked.queue = %(queue)s
) as waiting
