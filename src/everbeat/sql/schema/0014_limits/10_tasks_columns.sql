-- The gates that a task must pass to start (null: none). A gate is the name of a limit, or its name and a key, as in 'tenant/acme'. `costs`
-- contains the number of permits that the task takes of each gate (null: one of each). `permit` is the claim_call of the claim that took
-- the permits of the task's current lease. The check refuses every lease without permits, whichever statement writes it. It is "not valid"
-- because validating it would read the whole table under an exclusive lock. Existing rows satisfy it, because they have no gates.
alter table {schema}.tasks
    add column gates text[], add column costs integer[], add column permit uuid,
    add constraint tasks_permit check (
        gates is null or state not in ('CLAIMED', 'RUNNING') or (permit is not null and permit is not distinct from claim_call)
    ) not valid,
    add constraint tasks_gates check (
        gates is null or (array_ndims(gates) = 1 and cardinality(gates) <= 8 and array_position(gates, null) is null) is true
    ) not valid,
    add constraint tasks_costs check (
        costs is null or (array_ndims(costs) = 1 and cardinality(costs) = cardinality(gates) and 0 < all (costs) and 1000000 > all (costs)) is true
    ) not valid
