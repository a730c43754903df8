-- The state, result and error of these tasks; unknown ids are missing from the answer.
select t.id, t.name, t.state, t.result::text, t.error::text
from {schema}.tasks t
where t.id = any(%(ids)s::uuid[])
