-- List the groups of waiting marked tasks, by their needs. For each (needs_id, queue, priority), return the name of a task and `needs`.
-- Return at most `most` groups, starting after the given position. Groups of tasks in serial lines have no queue and come after all others,
-- because a claim finds such tasks through their line. A group whose only need is "limits" has no name, because each worker meets it. The name and `needs` come from a row whose hash is needs_id; they are null if none
-- of the first 100 rows matches. So a forged row cannot hide the other rows of its group. The statement skips through two small indexes, so
-- the number of tasks in a group does not matter.
with recursive marked (needs_id, queue, priority, place) as (
    (
        select t.needs_id, t.queue, t.priority, 1
        from {schema}.tasks t
        where t.state = 'PENDING' and t.serial is null and t.needs_id is not null
          and (t.needs_id, t.queue, t.priority) > (%(after_id)s::uuid, %(after_queue)s::text, %(after_priority)s::smallint)
        order by t.needs_id, t.queue, t.priority limit 1
    )
    union all
    select further.needs_id, further.queue, further.priority, marked.place + 1
    from marked
    cross join lateral (
        select t.needs_id, t.queue, t.priority
        from {schema}.tasks t
        where t.state = 'PENDING' and t.serial is null and t.needs_id is not null
          and (t.needs_id, t.queue, t.priority) > (marked.needs_id, marked.queue, marked.priority)
        order by t.needs_id, t.queue, t.priority limit 1
    ) further
    where marked.place < %(most)s
), in_line (needs_id, place) as (
    (
        select t.needs_id, 1
        from {schema}.tasks t
        where t.state = 'PENDING' and t.serial is not null and t.needs_id is not null and t.needs_id > %(after_in_line)s::uuid
        order by t.needs_id limit 1
    )
    union all
    select further.needs_id, in_line.place + 1
    from in_line
    cross join lateral (
        select t.needs_id
        from {schema}.tasks t
        where t.state = 'PENDING' and t.serial is not null and t.needs_id is not null and t.needs_id > in_line.needs_id
        order by t.needs_id limit 1
    ) further
    where in_line.place < %(most)s
)
select m.needs_id, m.queue, m.priority, one.name, one.needs, m.place
from marked m
left join lateral (
    select few.name, few.needs::text as needs
    from (
        select t.name, t.needs from {schema}.tasks t
        where t.state = 'PENDING' and t.serial is null and t.needs_id = m.needs_id and t.queue = m.queue and t.priority = m.priority
        limit 100
    ) few
    where octet_length(few.needs::text) <= 10000 and {schema}.mark_of(few.name, few.needs) = m.needs_id
    limit 1
) one on true
union all
select l.needs_id, null, null, case when {schema}.is_marked(one.needs::json) then one.name end, one.needs, l.place
from in_line l
left join lateral (
    select few.name, few.needs::text as needs
    from (
        select t.name, t.needs from {schema}.tasks t
        where t.state = 'PENDING' and t.serial is not null and t.needs_id = l.needs_id
        limit 100
    ) few
    where octet_length(few.needs::text) <= 10000 and {schema}.mark_of(few.name, few.needs) = l.needs_id
    limit 1
) one on true
