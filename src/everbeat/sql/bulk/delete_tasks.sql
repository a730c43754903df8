-- Delete ended tasks of one portion of a bulk action with their records, also those in `history`, as retention/prune_tasks. Tasks that another
-- session has locked are not returned, and neither are those that another session has moved back to `tasks` meanwhile. Otherwise, return each
-- task with a null, or with the reason why it was skipped.
with held as materialized (
    select t.* from {schema}.tasks t where t.id = any(%(ids)s::text::uuid[]) order by t.id for update skip locked
), judged as materialized (
    select
        t.id,
        case
            when t.state not in ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED')
                or greatest(t.completed_at, t.failed_at, t.cancelled_at, t.expired_at) > %(requested_at)s then 'CHANGED'
            else {fragment/refusal_of_ended}
        end as refusal
    from held t
), gone as (
    delete from {schema}.tasks t where t.id = any(array(select j.id from judged j where j.refusal is null)) returning t.id
), gone_attempts as (
    delete from {schema}.attempts a where a.task_id = any(array(select g.id from gone g))
), gone_recoveries as (
    delete from {schema}.recoveries r where r.task_id = any(array(select g.id from gone g))
), gone_steps as (
    delete from {schema}.steps s where s.task_id = any(array(select g.id from gone g))
), gone_signals as (
    delete from {schema}.signals s where s.target = any(array(select g.id from gone g))
), moved as materialized (
    select t.id, {fragment/refusal_of_ended} as refusal
    from {schema}.history t where t.id = any(%(ids)s::text::uuid[])
), gone_history as (
    delete from {schema}.history h where h.id = any(array(select m.id from moved m where m.refusal is null)) returning h.id
), gone_labels as (
    delete from {schema}.labels l
    where l.id = any(array(select g.id from gone g)) or l.id = any(array(select g.id from gone_history g))
), gone_logs as (
    delete from {schema}.attempt_logs l
    where l.task_id = any(array(select g.id from gone g)) or l.task_id = any(array(select g.id from gone_history g))
)
select j.id, j.refusal from judged j
union all
select m.id, m.refusal from moved m where m.refusal is not null or m.id in (select g.id from gone_history g)
