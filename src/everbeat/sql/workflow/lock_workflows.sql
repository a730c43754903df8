-- Lock workflows with events in the outbox, except those that another session has locked. The other session checks again when it has
-- finished. `only` restricts the statement to one workflow and the workflows nested in it.
with recursive tree (id) as (
    select %(only)s::uuid where %(only)s::uuid is not null
    union
    select c.id from tree t join {schema}.workflows c on c.parent_id = t.id
)
select w.id, w.state, w.on_error, w.largest_arguments
from {schema}.workflows w
where w.id = any(array(
    select distinct o.workflow_id
    from (
        select o.workflow_id from {schema}.outbox o
        where o.workflow_id <> all(%(without)s::text::uuid[]) and (%(only)s::uuid is null or o.workflow_id in (select t.id from tree t))
        order by o.id limit %(entries)s
    ) o
))
order by w.id
limit %(limit)s
for no key update skip locked
