-- Resumes a task function or a queue, and hints at what may wait for that. No row: it was not paused.
with resumed as (
    delete from {schema}.pauses p where p.kind = %(kind)s and p.name = %(name)s
    returning p.kind, p.name, p.paused_at, p.paused_by, p.reason, p.crashes
)
select r.kind, r.name, r.paused_at, r.paused_by, r.reason, r.crashes,
    pg_notify(%(channel)s, case r.kind when 'queue' then 't:' || r.name else '*' end)
from resumed r
