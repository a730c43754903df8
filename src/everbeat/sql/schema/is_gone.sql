-- Whether there is no schema of this name.
select not exists (select from pg_namespace n where n.nspname = %s) as is_gone
