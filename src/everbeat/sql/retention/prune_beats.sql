-- Delete a batch of old heartbeats, oldest first. The scan continues at the time of the last deleted heartbeat, because deleted rows stay
-- in the index until a vacuum. Return the position at which the next step begins, or null at the end.
with old as materialized (
    select b.ctid as place, b.sent_at from {schema}.beats b
    where b.sent_at >= %(after)s and b.sent_at < statement_timestamp() - %(hours)s * interval '1 hour'
    order by b.sent_at
    limit %(limit)s
    for update skip locked
), gone as (
    delete from {schema}.beats b where b.ctid = any(array(select o.place from old o)) returning 1
)
select (select max(sent_at) from old having count(*) = %(limit)s) as next_after, (select count(*) from gone) as beats
