-- Delete a batch of old samples of one kind, oldest first. The first sample of an hour (3600) is kept for 30 days, and the
-- first of another minute (60) for 48 hours. Other samples (10) are kept for 2 hours. Return the position at which the next step begins, or null at
-- the end. depths_by_time serves the statement.
with old as materialized (
    select d.ctid as place, d.at from {schema}.depths d
    where d.seconds = %(seconds)s and d.at >= %(after)s
      and d.at < statement_timestamp() - case %(seconds)s::integer when 10 then interval '2 hours' when 60 then interval '48 hours' else interval '30 days' end
    order by d.at
    limit %(limit)s
    for update skip locked
), gone as (
    delete from {schema}.depths d where d.ctid = any(array(select o.place from old o)) returning 1
)
select (select max(o.at) from old o having count(*) = %(limit)s) as next_after
