-- Close a gate for a time, because a task was told that the limit is reached elsewhere. A gate that is already closed for longer stays
-- closed for longer, so the statement can be repeated. Return the time until which this statement closes it.
with closed as (
    insert into {schema}.line_changes (gates, closed_until)
    values (array[%(gate)s::text], extract(epoch from statement_timestamp()) + %(closed_ms)s::bigint / 1000.0)
    returning closed_until
)
select to_timestamp(c.closed_until) as until from closed c
