-- Mark due tasks of functions that this worker does not have, in front of one lane: at most 1,000. After that, claims do not pass over them.
-- The mark is the one that a decline sets (task/decline_tasks). So each worker whose code accepts the arguments claims them as marked tasks.
-- None of the lane's first 1,000 due tasks may have a name of the worker: then the mark costs less than the claims would. A task is left in
-- its place if its arguments cannot be marked. Return the number of marked tasks.
with recursive {fragment/lanes_of_queues}, foreign_lane as materialized (
    select lane.queue, lane.priority
    from lane
    where lane.priority > -32769
      and not exists (
          select from (
              select t.name from {schema}.tasks t
              where t.state = 'PENDING' and t.serial is null and t.needs_id is null and t.queue = lane.queue and t.priority = lane.priority
                and t.enqueued_at <= statement_timestamp()
              order by t.enqueued_at, t.id limit 1000
          ) front
          where front.name = any(%(names)s::text[])
      )
      and exists (
          select from {schema}.tasks t
          where t.state = 'PENDING' and t.serial is null and t.needs_id is null and t.queue = lane.queue and t.priority = lane.priority
            and t.enqueued_at <= statement_timestamp()
          order by t.enqueued_at, t.id limit 1 offset 999
      )
    limit 1
), front as materialized (
    select t.id, t.name, t.args
    from foreign_lane l
    cross join lateral (
        select t.id, t.name, t.args from {schema}.tasks t
        where t.state = 'PENDING' and t.serial is null and t.needs_id is null and t.queue = l.queue and t.priority = l.priority
          and t.enqueued_at <= statement_timestamp()
        order by t.enqueued_at, t.id
        limit 1000
        for no key update skip locked
    ) t
), readable as materialized (
    select f.id, f.name, f.args
    from front f
    where json_typeof(f.args) = 'object' and (position(E'\\u' in f.args::text) = 0 or {schema}.is_readable(f.args))
), named as (
    select f.id, f.name, given.needs
    from readable f
    cross join lateral (
        select json_build_object('arguments', coalesce(json_agg(k.name order by k.name collate "C"), '[]'::json)) as needs,
            count(*) > count(distinct k.name) as has_doubles
        from json_object_keys(f.args) k (name)
    ) given
    where not given.has_doubles and octet_length(given.needs::text) <= 4096
), aside as (
    update {schema}.tasks t
    set needs = n.needs, needs_id = {schema}.mark_of(n.name, n.needs)
    from named n
    where t.id = n.id and t.name <> all(%(names)s::text[])
    returning t.id
)
select (select count(*) from aside) as tasks,
    (select pg_notify(%(channel)s, 'm') from (select from aside limit 1) one where (select pg_notification_queue_usage()) < 0.5) as hint
