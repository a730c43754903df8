-- Under which name each schema with everbeat's tables was made: its functions still write to that one after "alter schema ... rename".
select n.nspname, substring(p.prosrc from 'insert into "(.+)"[.]outbox') as made_as
from pg_proc p
join pg_namespace n on n.oid = p.pronamespace
where p.proname = 'task_ended' and p.pronargs = 0
