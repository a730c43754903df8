-- List the finished steps of versions that have not been applied, in order.
select s.version, s.name
from {schema}.schema_steps s
where not exists (select from {schema}.schema_versions v where v.version = s.version)
order by s.version, s.name
