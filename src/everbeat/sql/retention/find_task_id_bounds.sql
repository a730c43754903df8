-- Return two lower bounds for task ids: for a task sent when ended tasks become old enough to delete, and for a task sent now. Ids are
-- UUIDv7.
select
    (lpad(to_hex(greatest(0, floor(extract(epoch from moment.old) * 1000))::bigint), 12, '0') || repeat('0', 20))::uuid as old,
    (lpad(to_hex(floor(extract(epoch from moment.now) * 1000)::bigint), 12, '0') || repeat('0', 20))::uuid as now
from (
    select statement_timestamp() - %(hours)s * interval '1 hour' as old, statement_timestamp() as now
) moment
