-- At most one live task per name and key.
create unique index tasks_key on {schema}.tasks (name, key)
    where key is not null and state in ('PENDING', 'CLAIMED', 'RUNNING')
