-- Delete a batch of old rows of the audit log, and of bulk actions that ended long ago, oldest first. Return how many rows were deleted.
with old as materialized (
    select l.id from {schema}.audit_log l
    where l.at < statement_timestamp() - %(hours)s * interval '1 hour'
    order by l.at, l.id
    limit %(limit)s
    for update skip locked
), gone as (
    delete from {schema}.audit_log l where l.id = any(array(select o.id from old o)) returning 1
), gone_actions as (
    delete from {schema}.bulk_actions b where b.ended_at < statement_timestamp() - %(hours)s * interval '1 hour' returning 1
)
select (select count(*) from gone) + (select count(*) from gone_actions) as gone
