-- Whether a retention pass deletes the workflow `w`. The conditions are those of retention/prune_workflows.
coalesce(
    w.ended_at < statement_timestamp() - %(hours)s::integer * interval '1 hour' and (w.id < %(old_id)s or w.id > %(now_id)s)
    and not exists (select from {schema}.workflows p where p.id = w.parent_id and p.ended_at is null), false
)
