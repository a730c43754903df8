-- List the applied versions in order, each with the oldest code that works with the schema from that version on. A schema up to version 10
-- has no such column.
select v.version, (to_jsonb(v) ->> 'oldest_code')::integer as oldest_code from {schema}.schema_versions v order by v.version
