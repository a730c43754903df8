-- The requirements on the code of a worker that leases the task, as an object; null for nearly all tasks. A worker that finds an unknown
-- requirement must leave the task alone. `needs_id` is a hash of the task's name and `needs`.
-- The check is "not valid" because validating it would read the whole table under an exclusive lock. Existing rows satisfy it, because they
-- have neither value, and PostgreSQL enforces it for every row that is written.
alter table {schema}.tasks
    add column needs json,
    add column needs_id uuid,
    add constraint tasks_needs_and_id check ((needs is null) = (needs_id is null)) not valid
