-- Return the state, result and error of these workflows.
select w.id, w.name, w.state, w.result::text as result, w.error::text as error
from {schema}.workflows w
where w.id = any(%(ids)s::text::uuid[])
