-- Move a task back from `history`, so that it can be retried. The caller retries it in the same transaction.
select {schema}.recall_from_history(%(id)s::uuid, null)
