-- Delete a batch of peaks of spans of `seconds` that began more than `kept_s` ago, oldest first. Return the position at which the next step
-- begins, or null at the end. The primary key serves the statement, because peaks of all queues and of one are different kinds.
with old as materialized (
    select p.ctid as place, p.at from {schema}.depth_peaks p
    where p.seconds = %(seconds)s and p.is_total = %(is_total)s and p.at >= %(after)s
      and p.at < statement_timestamp() - %(kept_s)s * interval '1 second'
    order by p.at
    limit %(limit)s
    for update skip locked
), gone as (
    delete from {schema}.depth_peaks p where p.ctid = any(array(select o.place from old o)) returning 1
)
select (select max(o.at) from old o having count(*) = %(limit)s) as next_after
