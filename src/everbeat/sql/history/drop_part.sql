-- Drop a partition of `history` whose tasks all ended more than `hours` ago. Return what happened: dropped, locked or needed.
select {schema}.drop_history_part(%(name)s::text, statement_timestamp() - %(hours)s::integer * interval '1 hour')
