-- Supervisors that were not ended: how many there are, how many were silent for so long with their whole tree, by the database's clock, and
-- how many tasks the silent ones hold. The lost ones have no session in PostgreSQL any more; the living ones have, and beat lately.
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
