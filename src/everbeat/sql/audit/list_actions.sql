-- List the audit log, newest first, by its index on the time. No index serves the actor and the action, so at most `most` entries are examined
-- (null: all).
select l.id, l.at, l.actor, l.origin, l.action, l.target, l.filters::text as filters, l.affected, l.outcome, l.note
from (
    select l.* from {schema}.audit_log l
    where {fragment/audit_scope}
    order by l.at desc, l.id desc
    limit %(most)s
) l
where (%(actor)s::text is null or l.actor = %(actor)s)
  and (%(action)s::text is null or l.action = %(action)s)
order by l.at desc, l.id desc
limit %(limit)s
