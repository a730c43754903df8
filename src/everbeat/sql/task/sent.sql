-- What an insert found in its place: the task itself, which an earlier try had sent, or the live one that has its key. No row where that
-- one ended at this very moment.
select t.id from {schema}.tasks t where t.id = %(id)s
union all
select t.id from {schema}.tasks t
where %(key)s::text is not null and t.name = %(name)s and t.key = %(key)s and t.state in ('PENDING', 'CLAIMED', 'RUNNING')
  and not exists (select from {schema}.tasks i where i.id = %(id)s)
limit 1
