-- Count the tasks that are suspected of killing their worker, and name one of them.
with found as materialized (
    select t.id, t.name from {schema}.tasks t where t.state = 'PENDING' and t.suspect
    union all
    select t.id, t.name from {schema}.tasks t where t.state in ('CLAIMED', 'RUNNING') and t.suspect
)
select count(*) as count, (array_agg(f.id order by f.id))[1] as id, (array_agg(f.name order by f.id))[1] as name from found f
