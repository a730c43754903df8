-- List leases that automatic recovery should have recovered long ago. The lease's holder was silent for longer than the threshold and
-- several checks of a sweeper, or its worker has ended. A lease is abandoned if its tree has no session and no other tree is live. A null
-- threshold excludes leases in the corresponding state. Leases for which a recovery hook returned Skip are also left out.
with overdue as materialized (
    {fragment/overdue_leases}
), lost as materialized (
    select x.id from {schema}.trees_without_session() x
), abandoned as materialized (
    select l.id from {schema}.leases l
    where l.ended_at is null and l.supervisor_id in (select x.id from lost x) and not exists (
        select from {schema}.supervisors s
        where s.ended_at is null and s.id not in (select x.id from lost x)
          and s.last_beat_at > statement_timestamp() - greatest(%(stale_ms)s, s.claimed_stale_ms) * interval '1 millisecond'
    )
)
select
    count(*) filter (where o.ended_at is null) as silent, count(*) filter (where o.ended_at is not null) as ended,
    coalesce((array_agg(o.id order by o.overdue_ms desc))[1], (select a.id from abandoned a limit 1)) as task_id,
    max(o.overdue_ms) as overdue_ms, (select count(*) from abandoned) as abandoned
from overdue o
where o.overdue_ms > 0
