-- Find the next live tasks of a bulk action: one step of a walk by the primary key, as bulk/find_ended_tasks. Only tasks that were sent before
-- the request belong to the action. Live tasks are never in `history`: the condition on
-- `ended_at` leaves it out. The tasks are looked up by an array of their ids, because a join could read the whole table of tasks.
with looked as materialized (
    select
        t.id,
        (t.state = any(%(applicable)s::text[]) and t.sent_at <= %(requested_at)s and ({fragment/task_filters})) is true as is_match,
        {fragment/refusal_of_live} as refusal
    from {schema}.all_tasks t
    {fragment/last_event}
    where t.ended_at is null and t.id = any(array(
        select t.id from {schema}.tasks t
        where {fragment/task_scope} and t.id > %(after)s
        order by t.id
        limit %(most)s
    ))
), {fragment/bulk_walk}
