-- List the schemas that have the name prefix of benchmark schemas and that this role can drop. For each schema, return whether it contains
-- the table of supervisors.
select n.nspname, to_regclass(format('%I.supervisors', n.nspname)) is not null as is_made
from pg_namespace n
where starts_with(n.nspname, 'everbeat_bench_') and pg_has_role(n.nspowner, 'usage')
order by n.nspname
