-- Record one heartbeat: the proof of life of a supervisor for the leases that it holds in memory. The reply contains the lost leases, the
-- cancel requests, the leases without a process (phantoms), and the workers that can no longer claim. Others have ended these workers, or
-- a server that lost its last commits does not know them. The reply also shows whether the tree is quiet. If the reply has no row "beat", this supervisor was ended. The sequence starts again after its last value; observers
-- only compare it with the previous one. Losing a heartbeat in a server crash does no harm, so the heartbeat does not wait for the disk.
with relaxed as materialized (
    select set_config('synchronous_commit', 'off', true)
), beat as (
    update {schema}.supervisors s
    set beat_seq = s.beat_seq %% 9223372036854775807 + 1, last_beat_at = statement_timestamp(), draining = %(draining)s
    from relaxed
    where s.id = %(supervisor_id)s and s.ended_at is null
    returning s.beat_seq, s.last_beat_at, s.quiet_since
), history as (
    insert into {schema}.beats (supervisor_id, seq, sent_at, held)
    select %(supervisor_id)s, b.beat_seq, b.last_beat_at, cardinality(%(claim_ids)s::uuid[]) from beat b
    on conflict do nothing
), held as materialized (
    select * from unnest(%(ids)s::uuid[], %(claim_ids)s::uuid[]) as h (id, claim_id)
), lease as materialized (
    select t.id, t.claim_id, t.claimed_by_worker_id, t.cancel_requested_at
    from {schema}.workers w
    join {schema}.tasks t on t.claimed_by_worker_id = w.id and t.state in ('CLAIMED', 'RUNNING')
    where w.supervisor_id = %(supervisor_id)s
)
select 'beat' as kind, null::uuid as id, null::uuid as claim_id, b.beat_seq::text as detail from beat b
union all
select 'quiet', null, null, null from beat b where b.quiet_since is not null
union all
select 'lost', h.id, h.claim_id, null from held h where not exists (select from lease l where l.claim_id = h.claim_id)
union all
select 'cancel', l.id, l.claim_id, l.claimed_by_worker_id from lease l
where l.cancel_requested_at is not null and exists (select from held h where h.claim_id = l.claim_id)
union all
select 'phantom', l.id, l.claim_id, l.claimed_by_worker_id from lease l where not exists (select from held h where h.claim_id = l.claim_id)
union all
select 'ended', null, null, mine.id from unnest(%(worker_ids)s::text[]) as mine (id)
where not exists (select from {schema}.workers w where w.id = mine.id and w.ended_at is null)
