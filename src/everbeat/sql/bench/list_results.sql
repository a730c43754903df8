-- Return the id and the result of each completed task with a given name. The result is a number.
select t.id, t.result::text::float8 as result
from {schema}.tasks t
where t.name = %(name)s and t.state = 'COMPLETED'
