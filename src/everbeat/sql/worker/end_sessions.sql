-- Ends the sessions that are left of dead trees, and returns them; `ended` is false where this role must not end the session. Only backends
-- that wait for their client are ended: one that commits might wait for a standby, and would show what the standby might lose. A tree with a
-- living supervisor, or with one that left in good order, is not dead. A session of another role than that of the tree bears its name by
-- chance or to deceive. The tree of this session itself is not touched.
with dead as materialized (
    select s.session_name as tree, max(s.session_role) as role
    from {schema}.supervisors s
    group by s.session_name
    having bool_and(s.ended_at is not null and s.ended_how <> 'left')
),
remaining as materialized (
    select a.pid, a.application_name, a.usename::text as role, a.wait_event_type,
        a.usename is not null and (current.is_super or (not r.rolsuper and (
            pg_has_role(a.usesysid, 'USAGE') or (pg_has_role('pg_signal_backend', 'USAGE') and a.state is not null)
        ))) as may_end
    from pg_stat_activity a
    join dead d on d.tree = split_part(a.application_name, ' ', 1) and a.usesysid = coalesce(d.role, a.usesysid)
    join pg_roles r on r.oid = a.usesysid
    cross join (select rolsuper as is_super from pg_roles where rolname = current_user) current
    where a.datname = current_database()
      and d.tree <> split_part(current_setting('application_name'), ' ', 1)
)
select m.pid, m.application_name, m.role, case when m.may_end then pg_terminate_backend(m.pid) else false end as ended
from remaining m
where m.wait_event_type = 'Client' or not m.may_end
order by m.pid
