-- Delete a batch of rates that are older than 30 days, oldest first. Return the position at which the next step begins, or null at the end.
-- The primary key serves the statement.
with old as materialized (
    select r.ctid as place, r.at from {schema}.rates r
    where r.seconds = 3600 and r.at >= %(after)s and r.at < statement_timestamp() - interval '30 days'
    order by r.at
    limit %(limit)s
    for update skip locked
), gone as (
    delete from {schema}.rates r where r.ctid = any(array(select o.place from old o)) returning 1
)
select (select max(o.at) from old o having count(*) = %(limit)s) as next_after
