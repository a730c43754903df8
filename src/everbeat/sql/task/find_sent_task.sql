-- Return the task that prevented an insert: the same task from an earlier try, or the live task that has its key. Return no row if that
-- live task has just ended.
select t.id from {schema}.tasks t where t.id = %(id)s
union all
select t.id from {schema}.tasks t
where %(key)s::text is not null and t.name = %(name)s and t.key = %(key)s and t.state in ('PENDING', 'CLAIMED', 'RUNNING')
  and not exists (select from {schema}.tasks i where i.id = %(id)s)
limit 1
