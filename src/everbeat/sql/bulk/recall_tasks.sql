-- Move those of these tasks that are in `history` back, so that a bulk action can retry them in the same transaction. Return how many tasks moved.
select {schema}.recall_many(%(ids)s::text::uuid[], null)
