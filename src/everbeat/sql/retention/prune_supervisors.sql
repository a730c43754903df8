-- Delete supervisors that ended long ago and whose workers have all been deleted: one step of a scan of the primary key. An ended
-- supervisor gets no new workers. Return the position at which the next step begins, or null at the end.
with looked as materialized (
    select s.id from {schema}.supervisors s
    where s.id > %(after)s
    order by s.id
    limit %(limit)s
), old as materialized (
    select s.id from {schema}.supervisors s
    where s.id = any(array(select l.id from looked l)) and s.ended_at < statement_timestamp() - %(hours)s * interval '1 hour'
      and not exists (select from {schema}.workers w where w.supervisor_id = s.id)
    for update of s skip locked
), gone as (
    delete from {schema}.supervisors s where s.id = any(array(select o.id from old o)) returning 1
)
select (select max(id) from looked having count(*) = %(limit)s) as next_after, (select count(*) from gone) as supervisors
