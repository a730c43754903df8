-- Count the live tasks and the failures by state and by virtual state (see fragment/task_filters). Each part reads the first `most` tasks of an index.
-- So a large backlog costs no more. Waiting tasks are in tasks_pending, tasks_marked and tasks_line. The other indexes are tasks_suspended, tasks_suspect,
-- tasks_leased, tasks_failed and history_failed. `at_least` names the counts that can be too low.
with waiting as materialized (
    select t.enqueued_at, t.next_retry_at, t.wake_at from {schema}.tasks t
    where t.state = 'PENDING' and t.serial is null and t.needs_id is null
    order by t.queue, t.priority, t.enqueued_at, t.id limit %(most)s::bigint + 1
), apart as materialized (
    (
        select t.enqueued_at, t.next_retry_at, t.wake_at from {schema}.tasks t
        where t.state = 'PENDING' and t.serial is null and t.needs_id is not null
        order by t.needs_id, t.queue, t.priority, t.enqueued_at, t.id limit %(most)s::bigint + 1
    )
    union all
    (
        select t.enqueued_at, t.next_retry_at, t.wake_at from {schema}.tasks t
        where t.state = 'PENDING' and t.serial is not null
        order by t.serial, t.serial_at, t.id limit %(most)s::bigint + 1
    )
    limit %(most)s::bigint + 1
), suspended as materialized (
    select t.enqueued_at, t.wake_at from {schema}.tasks t
    where t.state = 'PENDING' and t.serial is null and t.needs_id is null and t.wake_at is not null
    order by t.queue, t.priority, t.enqueued_at, t.wake_at limit %(most)s::bigint + 1
), suspect as materialized (
    select t.enqueued_at from {schema}.tasks t
    where t.state = 'PENDING' and t.suspect
    order by t.enqueued_at limit %(most)s::bigint + 1
), held as materialized (
    select t.state, t.suspect from {schema}.tasks t
    where t.state in ('CLAIMED', 'RUNNING')
    order by t.claimed_by_worker_id limit %(most)s::bigint + 1
), failed as materialized (
    select t.failed_at from {schema}.all_tasks t
    where t.state = 'FAILED' and t.failed_at > '0002-01-01 00:00:00+00' and t.failed_at <= statement_timestamp()
    order by t.failed_at desc limit %(most)s::bigint + 1
), has_more as materialized (
    select
        (select count(*) from waiting) > %(most)s as waiting, (select count(*) from apart) > %(most)s as apart,
        (select count(*) from suspended) > %(most)s as suspended, (select count(*) from suspect) > %(most)s as suspect,
        (select count(*) from held) > %(most)s as held, (select count(*) from failed) > %(most)s as failed
), pending as (
    select
        count(*) as pending, count(*) filter (where w.next_retry_at is not null) as retrying,
        count(*) filter (where w.enqueued_at > statement_timestamp() and w.next_retry_at is null and w.wake_at is null) as scheduled,
        count(*) filter (where w.enqueued_at < statement_timestamp() - %(overdue_ms)s::bigint * interval '1 millisecond') as overdue
    from (select * from waiting union all select * from apart) w
), sleeping as (
    select count(*) as suspended
    from (select s.enqueued_at, s.wake_at from suspended s union all select a.enqueued_at, a.wake_at from apart a) s
    where s.enqueued_at > statement_timestamp() and s.wake_at > statement_timestamp()
), running as (
    select count(*) filter (where h.state = 'RUNNING') as running, count(*) filter (where h.suspect) as suspect from held h
)
select
    p.pending, r.running, (select count(*) from failed) as failed, p.retrying, p.scheduled, s.suspended, p.overdue,
    r.suspect + (select count(*) from suspect) as suspect,
    array_remove(array[
        case when m.waiting or m.apart then 'PENDING' end, case when m.held then 'RUNNING' end, case when m.failed then 'FAILED' end,
        case when m.waiting or m.apart then 'retrying' end, case when m.waiting or m.apart then 'scheduled' end,
        case when m.suspended or m.apart then 'suspended' end, case when m.waiting or m.apart then 'overdue' end,
        case when m.suspect or m.held then 'suspect' end
    ], null) as at_least
from has_more m
cross join pending p
cross join sleeping s
cross join running r
