-- Return which supervisors still hold their session lock, and whether any session of their tree remains. The statement reads pg_locks
-- without waiting. Only sessions of the tree's own role count, because any role can use any application_name and take any advisory lock.
-- `held_here`: the supervisor took its lock on this incarnation of the server, so a lock that is missing here was released here.
-- `lost_in_crash`: a server crash ends all sessions, but the main server process survives. The crash discards the cluster's statistics,
-- which every role can see. An operator can reset the statistics of one view, so the older of two times is used. The times are read only if
-- needed. `beats_here`: a backend that is working on a statement might have lost its client. Other roles cannot see the backend's state:
-- for them, it counts as connected. The sessions and locks of a tree are looked up in JSON objects, because nested loops would
-- compare each tree with each session. `turn` is the observer's turn to watch, which the statement renews if it ends soon (see
-- take_watch_turn). If another supervisor has taken this turn, the result is empty. An observer without a turn passes null.
with relaxed as materialized (
    select set_config('synchronous_commit', 'off', true) where %(turn)s::text is not null
), renewed as (
    update {schema}.turns t
    set taken_at = statement_timestamp(), taken_until = statement_timestamp() + %(turn_ms)s * interval '1 millisecond'
    from relaxed
    where t.service = %(turn)s and t.taken_by = %(taken_by)s
      and t.taken_until < statement_timestamp() + %(renewed_ms)s * interval '1 millisecond'
), {fragment/tree_sessions}
select
    s.id, s.beat_seq, s.session_at,
    coalesce(s.session_held and s.session_server = h.incarnation, false) as held_here,
    tree.locked, tree.sessions,
    s.last_beat_at > statement_timestamp() - %(silence_kept_ms)s * interval '1 millisecond' as beat_lately,
    case
        when tree.locked or tree.sessions > 0 then false
        else coalesce(s.session_at < (select least(b.stats_reset, r.stats_reset) from pg_stat_bgwriter b, pg_stat_archiver r), false)
    end as lost_in_crash,
    tree.beats as beats_here, coalesce(s.session_held, false) as session_held
from {schema}.supervisors s
cross join here h
cross join lateral (
    {fragment/session_of_tree}
) tree
where s.ended_at is null
  and (%(turn)s::text is null or exists (select from {schema}.turns t where t.service = %(turn)s and t.taken_by = %(taken_by)s))
