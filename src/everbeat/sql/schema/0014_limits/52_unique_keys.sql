-- The keys of tasks with `unique_for`. A key is taken while `until` is null or in the future. A key that was never freed belongs to the task
-- `task_id`. The primary key decides between two sends. Plain keys (`unique_for` is null) are in the index tasks_key.
create table {schema}.unique_keys (
    name     text not null,
    key      text not null,
    task_id  uuid not null,
    until    {schema}.endless,
    primary key (name, key)
) with (fillfactor = 85)
