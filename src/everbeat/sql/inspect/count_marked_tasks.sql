-- Count the waiting marked tasks by their needs and queue. Return at most 200 groups, the largest first. Only the first 100,000 tasks of
-- each type are read. The order makes the planner read an index even if most rows match. The name and `needs` of a group come from a row whose hash is needs_id, provided that one of the first 100 rows
-- matches. So a forged row cannot hide the other rows of its group. A mark that is larger than any that everbeat writes is returned as '',
-- because the reply must stay small.
with seen as materialized (
    (
        select t.needs_id, t.queue, t.id from {schema}.tasks t
        where t.state = 'PENDING' and t.serial is null and t.needs_id is not null
        order by t.needs_id, t.queue, t.priority, t.enqueued_at, t.id limit 100000
    )
    union all
    (
        select t.needs_id, t.queue, t.id from {schema}.tasks t
        where t.state = 'PENDING' and t.serial is not null and t.needs_id is not null and {schema}.is_marked(t.needs)
        order by t.needs_id limit 100000
    )
), grouped as materialized (
    select s.needs_id, s.queue, count(*) as waiting, (array_agg(s.id))[1] as id
    from seen s
    group by s.needs_id, s.queue
    order by count(*) desc, s.queue, s.needs_id
    limit 200
)
select coalesce(one.name, any_row.name) as name, g.queue, coalesce(one.needs, any_row.needs) as needs, g.waiting, g.id
from grouped g
left join lateral (
    select few.name, few.needs::text as needs
    from (
        (
            select t.name, t.needs from {schema}.tasks t
            where t.state = 'PENDING' and t.serial is null and t.needs_id = g.needs_id and t.queue = g.queue limit 100
        )
        union all
        (
            select t.name, t.needs from {schema}.tasks t
            where t.state = 'PENDING' and t.serial is not null and t.needs_id = g.needs_id limit 100
        )
    ) few
    where octet_length(few.needs::text) <= 10000 and {schema}.mark_of(few.name, few.needs) = g.needs_id
    limit 1
) one on true
cross join lateral (
    select t.name, case when octet_length(t.needs::text) <= 10000 then t.needs::text else '' end as needs
    from {schema}.tasks t where t.id = g.id limit 1
) any_row
order by g.waiting desc, name, g.queue, g.id
