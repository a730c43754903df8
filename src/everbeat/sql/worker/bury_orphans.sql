-- End the workers of ended supervisors, in case the observer that ended a supervisor died before it could end the workers. Locked rows,
-- such as those of a claim in flight, are left to the next sweep, because one transaction must not delay all others.
with grave as materialized (
    select w.id, s.ended_how from {schema}.workers w
    join {schema}.supervisors s on s.id = w.supervisor_id
    where w.ended_at is null and s.ended_at is not null
    order by w.id
    for update of w skip locked
)
update {schema}.workers w
set ended_at = statement_timestamp(), ended_how = g.ended_how, ended_cause = 'its supervisor ended before it (' || g.ended_how || ')'
from grave g
where w.id = g.id
returning w.id
