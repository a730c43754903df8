-- Return the bulk actions that failed within a day, and those that are due and have not changed for a minute.
select b.id, b.action, b.state, b.problem, extract(epoch from statement_timestamp() - b.changed_at)::float8 as still_s
from {schema}.bulk_actions b
where b.state = 'FAILED' and b.ended_at > statement_timestamp() - interval '1 day'
   or b.ended_at is null and greatest(b.next_at, b.changed_at) < statement_timestamp() - interval '1 minute'
order by b.requested_at desc
limit 20
