-- The schemas that bear the name of a bench's and that this role may drop, and whether the tables of workers were made in them.
select n.nspname, to_regclass(format('%I.supervisors', n.nspname)) is not null as is_made
from pg_namespace n
where starts_with(n.nspname, 'everbeat_bench_') and pg_has_role(n.nspowner, 'usage')
order by n.nspname
