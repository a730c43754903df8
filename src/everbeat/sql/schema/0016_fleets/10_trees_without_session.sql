-- Supervisors that have not ended, but whose trees have no session left in PostgreSQL, judged as in watch_sessions. Each of them took its
-- session lock on this incarnation of the server. Now neither the lock nor any session of the tree's role exists. A supervisor has no row
-- if this cannot be known: on a standby, behind a transaction pooler, or if the server hides sessions. The same applies after a restart of
-- the server, until the lock is taken again. The sessions and locks of a tree are looked up in JSON objects, as in watch_sessions. Sessions
-- of everbeat use no hash joins, and nested loops would compare each tree with each session.
create or replace function {schema}.trees_without_session() returns table (id text) language sql stable as $$
    with here as materialized (
        select {schema}.server_incarnation() as incarnation
    ), connected as materialized (
        select a.pid, a.usesysid as role, split_part(a.application_name, ' ', 1) as tree from pg_stat_activity a
    ), roles as materialized (
        select jsonb_object_agg(c.pid, c.role) as by_pid from connected c
    ), holders as materialized (
        select jsonb_object_agg(l.key, l.roles) as by_key
        from (
            select l.key, jsonb_agg(l.role) as roles
            from (
                select (l.classid::bigint << 32) | l.objid::bigint as key, r.by_pid ->> l.pid::text as role
                from pg_locks l
                cross join roles r
                where jsonb_exists(r.by_pid, l.pid::text) and l.locktype = 'advisory' and l.granted and l.objsubid = 1
                  and l.database = (select d.oid from pg_database d where d.datname = current_database())
            ) l
            group by l.key
        ) l
    ), trees as materialized (
        select jsonb_object_agg(c.tree, c.roles) as by_name, bool_or(c.is_hidden) as hides
        from (
            select coalesce(c.tree, '') as tree, c.tree is null as is_hidden, jsonb_agg(distinct c.role) as roles
            from connected c group by c.tree
        ) c
    )
    select s.id
    from {schema}.supervisors s
    cross join here h
    cross join holders k
    cross join trees t
    where s.ended_at is null and s.session_held and s.session_server = h.incarnation and not t.hides
      and not exists (
          select from jsonb_array_elements_text(k.by_key -> s.lock_key::text) l (role) where l.role::oid = coalesce(s.session_role, l.role::oid)
      )
      and not exists (
          select from jsonb_array_elements_text(t.by_name -> s.session_name) c (role) where c.role::oid = coalesce(s.session_role, c.role::oid)
      )
$$
