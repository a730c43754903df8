-- Delete a batch of old snapshots of workers, oldest first, as in prune_beats. Return the position at which the next step begins, or null
-- at the end.
with old as materialized (
    select x.ctid as place, x.at from {schema}.worker_states x
    where x.at >= %(after)s and x.at < statement_timestamp() - %(hours)s * interval '1 hour'
    order by x.at
    limit %(limit)s
    for update skip locked
), gone as (
    delete from {schema}.worker_states x where x.ctid = any(array(select o.place from old o)) returning 1
)
select (select max(at) from old having count(*) = %(limit)s) as next_after, (select count(*) from gone) as worker_states
