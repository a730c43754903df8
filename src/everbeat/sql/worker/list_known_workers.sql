-- List all workers that have a row, newest first, with the time and cause of their end. An operator can name any of them.
select
    w.id, w.ended_at is not null as is_ended, coalesce(w.ended_at, s.ended_at) as over_at,
    coalesce(w.ended_cause, w.ended_how, s.ended_how) as cause
from {schema}.workers w
join {schema}.supervisors s on s.id = w.supervisor_id
order by w.started_at desc, w.id
limit 10000
