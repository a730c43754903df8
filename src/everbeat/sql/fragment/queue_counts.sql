-- The queues with live tasks, with the number of tasks that are due, not due (`later`), claimed and running. `suspended` is a part of `later`.
-- `oldest_due_s` is the wait of the oldest due task. The fragment needs `with recursive`. Counting stops at `most` tasks of a queue and state. With
-- many queues, it stops earlier, but not before 100: at `most_of_all` tasks of all queues together. Of lines, at most a hundredth as many are read.
-- Lanes and groups of marked tasks are found one by one. Queues and such groups are counted through their indexes. Serial lines and tasks in
-- flight have no index by queue. So at most ten times `most` of their entries are read, and of lines and of groups of marked tasks only the
-- first `most`. The order of each part makes the planner read an index even if most rows match.
{fragment/lanes}, {fragment/marked_lanes}, {fragment/serial_lines}, bound as materialized (
    select
        least(%(most)s::bigint, greatest(100, %(most_of_all)s::bigint / greatest(1, count(distinct l.queue)))) as most,
        array_agg(l.queue) as queues, array_agg(l.priority) as priorities, array_agg(l.first_at) as firsts
    from lane l
), grouped as materialized (
    select l.* from marked_lane l limit %(most)s + 1
), headed as materialized (
    select l.serial from serial_line l limit least(%(most)s::bigint, %(most_of_all)s::bigint / 100) + 1
), in_line as materialized (
    select w.queue, w.enqueued_at, w.wake_at
    from headed h
    cross join lateral (
        select t.queue, t.enqueued_at, t.wake_at from {schema}.tasks t
        where t.state = 'PENDING' and t.serial = h.serial order by t.serial_at, t.id limit %(most)s + 1
    ) w
    limit 10 * %(most)s::bigint + 1
), in_flight as materialized (
    select t.queue, t.state from {schema}.tasks t
    where t.state in ('CLAIMED', 'RUNNING') order by t.claimed_by_worker_id
    limit 10 * %(most)s::bigint + 1
), cut as materialized (
    select
        (select count(*) from grouped) > %(most)s or (select count(*) from headed) > least(%(most)s::bigint, %(most_of_all)s::bigint / 100)
            or (select count(*) from in_line) > 10 * %(most)s::bigint as waiting,
        (select count(*) from in_flight) > 10 * %(most)s::bigint as in_flight
), counted as (
    select n.queue, n.due as pending, n.later, n.suspended, 0::bigint as claimed, 0::bigint as running, n.oldest
    from bound b
    cross join lateral {schema}.count_queues(b.queues, b.priorities, b.firsts, b.most) n
    union all
    select g.queue, n.due, n.later, n.suspended, 0, 0, n.oldest
    from grouped g
    cross join lateral {schema}.count_lane(g.queue, g.priority, g.needs_id, %(most)s) n
    union all
    select
        w.queue, count(*) filter (where w.enqueued_at <= statement_timestamp()), count(*) filter (where w.enqueued_at > statement_timestamp()),
        count(*) filter (where w.enqueued_at > statement_timestamp() and w.wake_at > statement_timestamp()), 0, 0,
        min({schema}.plausible(w.enqueued_at)) filter (where w.enqueued_at <= statement_timestamp())
    from in_line w
    group by w.queue
    union all
    select head.queue, 0, 0, 0, 0, 0, null
    from headed h
    cross join lateral (
        select t.queue from {schema}.tasks t where t.state = 'PENDING' and t.serial = h.serial order by t.serial_at, t.id limit 1
    ) head
    where (select cut.waiting from cut)
    group by head.queue
    union all
    select f.queue, 0, 0, 0, count(*) filter (where f.state = 'CLAIMED'), count(*) filter (where f.state = 'RUNNING'), null
    from in_flight f
    group by f.queue
), queue_count as (
    select
        c.queue, least(sum(c.pending), b.most)::bigint as pending, least(sum(c.later), b.most)::bigint as later,
        least(sum(c.suspended), b.most)::bigint as suspended, least(sum(c.claimed), b.most)::bigint as claimed,
        least(sum(c.running), b.most)::bigint as running,
        extract(epoch from statement_timestamp() - min(c.oldest))::float8 as oldest_due_s,
        sum(c.pending) > b.most or cut.waiting as has_more_pending, sum(c.later) > b.most or cut.waiting as has_more_later,
        sum(c.claimed) > b.most or cut.in_flight as has_more_claimed, sum(c.running) > b.most or cut.in_flight as has_more_running
    from counted c
    cross join cut
    cross join bound b
    group by c.queue, cut.waiting, cut.in_flight, b.most
)
