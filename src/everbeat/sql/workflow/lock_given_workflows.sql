-- Lock these workflows, except those that another session has locked. The other session checks again, because the outbox lists the open
-- events.
select w.id, w.state, w.on_error, w.largest_arguments
from {schema}.workflows w
where w.id = any(%(ids)s::text::uuid[])
order by w.id
for no key update skip locked
