-- What the code of a worker must understand before it can lease the task: an object of requirements, null for nearly all tasks.
-- A worker that finds a requirement that it does not know must leave the task. `needs_id` is a hash of the task's name and `needs`.
-- The check is "not valid" because validating it would read the whole table under an exclusive lock. It holds for existing rows, which
-- have neither value, and PostgreSQL enforces it for every row that is written.
alter table {schema}.tasks
    add column needs json,
    add column needs_id uuid,
    add constraint tasks_needs_and_id check ((needs is null) = (needs_id is null)) not valid
