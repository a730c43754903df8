-- Marked tasks that wait, by what they need and their queue, the most first, at most 200 groups; the first 100,000 of each kind are looked
-- at. A mark of more than 100,000 bytes is answered as '' because the answer must stay small.
with seen as materialized (
    (
        select t.needs_id, t.queue, t.id from {schema}.tasks t
        where t.state = 'PENDING' and t.serial is null and t.needs_id is not null limit 100000
    )
    union all
    (
        select t.needs_id, t.queue, t.id from {schema}.tasks t
        where t.state = 'PENDING' and t.serial is not null and t.needs_id is not null limit 100000
    )
), grouped as materialized (
    select s.needs_id, s.queue, count(*) as waiting, (array_agg(s.id))[1] as id
    from seen s
    group by s.needs_id, s.queue
    order by count(*) desc, s.queue, s.needs_id
    limit 200
)
select t.name, g.queue, case when octet_length(t.needs::text) <= 100000 then t.needs::text else '' end as needs, g.waiting, g.id
from grouped g
cross join lateral (select t.name, t.needs from {schema}.tasks t where t.id = g.id limit 1) t
order by g.waiting desc, t.name, g.queue, g.id
