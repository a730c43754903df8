-- Takes these workflows, and waits for whoever is at them.
select w.id, w.state, w.on_error
from {schema}.workflows w
where w.id = any(%(ids)s::text::uuid[])
order by w.id
for no key update
