-- Delete old signals of deleted tasks or workflows: one step of a scan of the primary key. Return the position at which the next step
-- begins, or null at the end.
with looked as materialized (
    select s.id, s.target from {schema}.signals s
    where s.id > %(after)s and s.id < %(until)s
    order by s.id
    limit %(limit)s
), stray as materialized (
    select l.id from looked l
    where not exists (select from {schema}.tasks t where t.id = l.target)
      and not exists (select from {schema}.workflows w where w.id = l.target)
), gone as (
    delete from {schema}.signals s
    where s.id = any(array(select x.id from stray x)) and s.sent_at < statement_timestamp() - %(hours)s * interval '1 hour'
    returning 1
)
select
    case when (select count(*) from looked) = %(limit)s then (select id from looked order by id desc limit 1) end as next_after,
    (select count(*) from gone) as signals
