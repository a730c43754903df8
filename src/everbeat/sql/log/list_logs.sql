-- Return the attempts of a task that have a captured log, newest first, with the number of their last record. Each step searches the primary key
-- for the next attempt, so the size of the logs does not matter. An attempt has at most 16 parts.
with recursive found (attempt, claim_id, place) as (
    (select l.attempt, l.claim_id, 1 from {schema}.attempt_logs l
     where l.task_id = %(id)s and l.attempt <= coalesce(%(attempt)s::integer, 2147483647) and l.attempt >= coalesce(%(attempt)s::integer, 0)
     order by l.attempt desc, l.claim_id desc limit 1)
    union all
    select n.attempt, n.claim_id, f.place + 1
    from found f
    cross join lateral (
        select l.attempt, l.claim_id from {schema}.attempt_logs l
        where l.task_id = %(id)s and (l.attempt, l.claim_id) < (f.attempt, f.claim_id) and l.attempt >= coalesce(%(attempt)s::integer, 0)
        order by l.attempt desc, l.claim_id desc limit 1
    ) n
    where f.place < %(limit)s
)
select f.attempt, f.claim_id, (
    select max(l.last) from {schema}.attempt_logs l where l.task_id = %(id)s and l.attempt = f.attempt and l.claim_id = f.claim_id
) as last
from found f
order by f.place
