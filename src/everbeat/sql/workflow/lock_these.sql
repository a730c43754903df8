-- Takes these workflows, unless somebody else is at them, who looks again: what is to be looked at stands in the outbox.
select w.id, w.state, w.on_error, w.largest_arguments
from {schema}.workflows w
where w.id = any(%(ids)s::text::uuid[])
order by w.id
for no key update skip locked
