-- Return whether the schema and its table of versions exist.
select
    exists (select from pg_namespace where nspname = %(schema)s) as schema_there,
    to_regclass(%(versions_table)s) is not null as versions_there
