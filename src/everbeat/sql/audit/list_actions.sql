-- List the audit log, newest first, by its index on the time.
select l.id, l.at, l.actor, l.origin, l.action, l.target, l.filters::text as filters, l.affected, l.outcome, l.note
from {schema}.audit_log l
where l.at >= coalesce(%(since)s::timestamptz, statement_timestamp() - %(within_ms)s::bigint * interval '1 millisecond', '-infinity')
  and (%(actor)s::text is null or l.actor = %(actor)s)
  and (%(action)s::text is null or l.action = %(action)s)
  and (%(before)s::bigint is null or l.id < %(before)s)
order by l.at desc, l.id desc
limit %(limit)s
