-- Whether the supervisor `s` still holds its session lock, and how many sessions of its tree are connected. Needs the CTEs of
-- tree_sessions. Only sessions of the tree's own role count, because any role can use any application_name and take any advisory lock.
select
        exists (
            select from holders h cross join jsonb_array_elements_text(h.by_key -> s.lock_key::text) l (role)
            where l.role::oid = coalesce(s.session_role, l.role::oid)
        ) as locked,
        coalesce(sum(c.sessions), 0)::bigint as sessions, coalesce(bool_or(c.beats), false) as beats
    from trees t cross join jsonb_to_recordset(t.by_name -> s.session_name) as c (role oid, sessions bigint, beats boolean)
    where c.role = coalesce(s.session_role, c.role)
