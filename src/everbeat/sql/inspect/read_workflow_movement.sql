-- Return whether a workflow is advancing: the number of its unprocessed events, the oldest of them, and the live supervisors that can
-- process them. Counts of events stop at 1,001.
with happened as materialized (
    select o.at from {schema}.outbox o where o.workflow_id = %(id)s order by o.id limit 1001
), living as (
    select w.id
    {fragment/from_live_workers}
)
select
    statement_timestamp() as at, (select count(*) from happened) as unmoved, (select min(h.at) from happened h) as unmoved_since,
    (select count(*) from living) as alive, (
        select max(least(greatest(s.last_beat_at, w.last_beat_at, w.started_at), w.ended_at))
        from {schema}.workers w
        join {schema}.supervisors s on s.id = w.supervisor_id
    ) as last_seen_at,
    pg_is_in_recovery() as is_standby
