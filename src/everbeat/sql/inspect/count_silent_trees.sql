-- Count the supervisors that have not ended, and those whose whole tree has been silent for longer than the threshold by the database's
-- clock. Also count the tasks that silent trees hold. A lost tree no longer has a session in PostgreSQL. A live tree is not lost and has
-- sent a heartbeat recently.
with lost as materialized (
    select x.id from {schema}.trees_without_session() x
), tree as materialized (
    select
        s.id, s.pid, s.hostname, s.last_beat_at, s.claimed_stale_ms, s.id in (select x.id from lost x) as is_lost, greatest(s.last_beat_at, w.last_beat_at) < statement_timestamp() - greatest(%(silent_ms)s, 2 * s.beat_ms) * interval '1 millisecond'
            as is_silent
    from {schema}.supervisors s
    cross join lateral (
        select max(w.last_beat_at) as last_beat_at from {schema}.workers w where w.supervisor_id = s.id and w.ended_at is null
    ) w
    where s.ended_at is null
)
select
    count(*) as known, count(*) filter (where t.is_silent) as silent,
    (
        select count(*) from {schema}.tasks k
        join {schema}.workers w on w.id = k.claimed_by_worker_id
        where k.state in ('CLAIMED', 'RUNNING') and w.supervisor_id in (select x.id from tree x where x.is_silent)
    ) as held,
    count(*) filter (
        where not t.is_lost and t.last_beat_at > statement_timestamp() - greatest(%(stale_ms)s, t.claimed_stale_ms) * interval '1 millisecond'
    ) as living,
    array_agg(format('%%s (pid %%s on %%s)', t.id, t.pid, t.hostname) order by t.id) filter (where t.is_lost) as lost,
    (
        select count(*) from {schema}.tasks k
        join {schema}.workers w on w.id = k.claimed_by_worker_id
        where k.state in ('CLAIMED', 'RUNNING') and w.supervisor_id in (select x.id from lost x)
    ) as held_by_lost
from tree t
