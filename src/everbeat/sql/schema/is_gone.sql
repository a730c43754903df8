-- Return whether no schema has this name.
select not exists (select from pg_namespace n where n.nspname = %s) as is_gone
