-- Delete a batch of sums of spans of `seconds` that began more than `kept_s` ago, oldest first. Return the position at which the next step
-- begins, or null at the end. The primary key serves the statement, because sums of all queues and of one are different kinds.
with old as materialized (
    select s.ctid as place, s.at from {schema}.rate_sums s
    where s.seconds = %(seconds)s and s.is_total = %(is_total)s and s.at >= %(after)s
      and s.at < statement_timestamp() - %(kept_s)s * interval '1 second'
    order by s.at
    limit %(limit)s
    for update skip locked
), gone as (
    delete from {schema}.rate_sums s where s.ctid = any(array(select o.place from old o)) returning 1
)
select (select max(o.at) from old o having count(*) = %(limit)s) as next_after
