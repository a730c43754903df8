-- Lock these workflows, and move their tasks back from `history`, so that the workflows can be retried in the same transaction.
select {schema}.recall_from_history(null, %(ids)s::text::uuid[])
