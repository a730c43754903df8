-- Lock a task until the end of the transaction, and return its state. A task in `history` is not locked.
with held as materialized (
    select t.state from {schema}.tasks t where t.id = %(id)s for no key update
)
select h.state from held h
union all
select m.state from {schema}.history m where m.id = %(id)s and not exists (select from held)
