-- List pauses, newest first, without the rows that a pause of everything adds for older code.
select p.kind, p.name, p.paused_at, p.paused_by, p.reason, p.crashes
from {schema}.pauses p
where p.kind <> 'task' or not exists (select from {schema}.pauses a where a.kind = 'all' and a.call = p.call)
order by p.paused_at desc, p.kind, p.name
