-- The sessions and session locks of all trees, looked up in JSON objects, because nested loops would compare each tree with each session.
-- `beats`: a backend that is working on a statement might have lost its client. Other roles cannot see the backend's state: for them, it
-- counts as connected.
connected as materialized (
    select
        a.pid, a.usesysid as role, split_part(a.application_name, ' ', 1) as tree,
        split_part(a.application_name, ' ', 3) = 'beats'
            and (a.state = 'active' and a.wait_event_type is distinct from 'Client') is not true as beats
    from pg_stat_activity a
), {fragment/session_locks}
, holders as materialized (
    select jsonb_object_agg(l.key, l.roles) as by_key from (select l.key, jsonb_agg(l.role) as roles from locks l group by l.key) l
), trees as materialized (
    select jsonb_object_agg(c.tree, c.sessions) as by_name
    from (
        select c.tree, jsonb_agg(jsonb_build_object('role', c.role, 'sessions', c.sessions, 'beats', c.beats)) as sessions
        from (select c.tree, c.role, count(*) as sessions, bool_or(c.beats) as beats from connected c group by c.tree, c.role) c
        where c.tree is not null
        group by c.tree
    ) c
)
