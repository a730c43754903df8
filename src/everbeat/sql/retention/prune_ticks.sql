-- Delete a batch of old ticks of schedules, in the order in which they were decided, as in prune_beats. Return the position at which the next
-- step begins, or null at the end.
with old as materialized (
    select k.ctid as place, k.decided_at from {schema}.ticks k
    where k.decided_at >= %(after)s and k.decided_at < statement_timestamp() - %(hours)s * interval '1 hour'
    order by k.decided_at
    limit %(limit)s
    for update skip locked
), gone as (
    delete from {schema}.ticks k where k.ctid = any(array(select o.place from old o)) returning 1
)
select (select max(decided_at) from old having count(*) = %(limit)s) as next_after, (select count(*) from gone) as ticks
