-- The head of each serial line, which is the oldest open task of the line. The scan follows the order of the index tasks_serial_line: the
-- first entry after the key of a line is the head of the next line. A line therefore costs one index descent, however many tasks are
-- waiting in it. An additional condition `serial is not null` next to `serial > …` would make the planner expect a single row. The planner
-- would then read and sort all entries of a line.
line_head as (
    (
        select t.serial, t.id, t.name, t.queue, t.priority, t.state, t.enqueued_at, t.good_until, t.suspect, t.needs_id
        from {schema}.tasks t
        where t.serial is not null and t.state in ('PENDING', 'CLAIMED', 'RUNNING')
          and t.fence < 9223372036854775807 and t.attempt < 2147483647
        order by t.serial, t.serial_at, t.id limit 1
    )
    union all
    select next_head.*
    from line_head
    cross join lateral (
        select t.serial, t.id, t.name, t.queue, t.priority, t.state, t.enqueued_at, t.good_until, t.suspect, t.needs_id
        from {schema}.tasks t
        where t.serial > line_head.serial and t.state in ('PENDING', 'CLAIMED', 'RUNNING')
          and t.fence < 9223372036854775807 and t.attempt < 2147483647
        order by t.serial, t.serial_at, t.id limit 1
    ) next_head
)
