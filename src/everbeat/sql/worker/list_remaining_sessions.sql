-- List unused sessions of trees. Such sessions hold locks or prevent the removal of dead rows on the server. `is_left`: the session was
-- left by a dead tree and is waiting for its client. A session that is committing is left out, because closing it could reveal a commit
-- that the standby might lose. The other listed sessions are sending a reply that their process does not read, or have received only a
-- part of a request (`is_partial`); a caller must see such a session several times before closing it. A session with an unread reply is
-- listed only if it is on a Unix socket: over TCP, tcp_user_timeout detects whether the client reads. A tree is not dead if its supervisor is live or has shut down normally. If the session's role is not the tree's role,
-- the session uses the tree's name by chance or to deceive. `is_left` is never true for a session of the caller's own tree. `since` changes
-- with each connection, transaction and statement. The statement runs as the login role, as in inspect/read_session_activity: another role
-- cannot see the state of these sessions.
with login as materialized (
    select set_config('role', 'none', true) as role
),
tree as materialized (
    select s.session_name as name, max(s.session_role) as role, bool_and(s.ended_at is not null and s.ended_how <> 'left') as is_dead
    from {schema}.supervisors s
    group by s.session_name
),
remaining as materialized (
    select a.pid, a.application_name, r.rolname::text as role, a.wait_event_type, a.wait_event, a.client_port,
        a.state = 'active' and a.wait_event = 'ClientRead' as is_partial,
        greatest(a.backend_start, a.xact_start, a.query_start) as since,
        t.is_dead and t.name <> split_part(current_setting('application_name'), ' ', 1) as is_left,
        has_function_privilege(session_user, 'pg_catalog.pg_terminate_backend'::regproc, 'EXECUTE') and (
            own.rolsuper or (not r.rolsuper and (
                pg_has_role(session_user, a.usesysid, 'USAGE')
                or (pg_has_role(session_user, 'pg_signal_backend', 'USAGE') and a.state is not null)
            ))
        ) as may_end
    from login
    cross join lateral pg_stat_get_activity(nullif(login.role, 'none')::integer) a
    join tree t on t.name = split_part(a.application_name, ' ', 1) and a.usesysid = coalesce(t.role, a.usesysid)
    join pg_roles r on r.oid = a.usesysid
    join pg_roles own on own.rolname = session_user
    where a.datid = (select d.oid from pg_database d where d.datname = current_database())
)
select m.pid, m.application_name, m.role, m.since, m.is_left, m.may_end, coalesce(m.is_partial, false)
from remaining m
where case
    when m.is_left then m.wait_event_type = 'Client' or not m.may_end
    else (m.wait_event = 'ClientWrite' and m.client_port = -1) or m.is_partial
end
order by m.pid
