-- Return the name under which each schema with everbeat's tables was created. After "alter schema ... rename", the schema's functions still
-- write to the old name.
select n.nspname, substring(p.prosrc from 'insert into "(.+)"[.]outbox') as made_as
from pg_proc p
join pg_namespace n on n.oid = p.pronamespace
where p.proname = 'task_ended' and p.pronargs = 0
