-- At most one live workflow per name and key.
create unique index workflows_key on {schema}.workflows (name, key)
    where key is not null and state in ('RUNNING', 'PAUSED', 'CANCELLING')
