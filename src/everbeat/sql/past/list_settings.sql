-- List the last change of each pause and limit before a moment. Of the actions of operators, the `limit` latest ones before that moment are read,
-- by audit_log_by_time.
select distinct on (l.kind, l.target) l.at, l.action, l.target, l.actor, l.note
from (
    select l.at, l.id, l.action, l.target, l.actor, l.note, case when l.action in ('pause', 'resume') then 'pause' else 'limit' end as kind
    from (
        select a.at, a.id, a.action, a.target, a.actor, a.note
        from {schema}.audit_log a
        where a.at <= %(at)s
        order by a.at desc, a.id desc
        limit %(limit)s
    ) l
    where l.action in ('pause', 'resume', 'set_limit', 'clear_limit')
) l
order by l.kind, l.target, l.at desc, l.id desc
