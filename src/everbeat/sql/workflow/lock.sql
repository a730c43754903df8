-- Takes workflows that something has happened to, unless somebody else is at them: whoever is looks again when they have done.
select w.id, w.state, w.on_error
from {schema}.workflows w
where w.id = any(array(
    select distinct o.workflow_id from (select o.workflow_id from {schema}.outbox o order by o.id limit %(look)s) o
))
order by w.id
limit %(limit)s
for no key update skip locked
