-- Find the next ended tasks of a bulk action, also in `history`: one step of a walk by the primary keys. The step examines at most `most`
-- tasks, and ends at the task with the number `acted` that can be acted on. Only tasks that ended before the request belong to the action.
with looked as materialized (
    select
        t.id,
        (t.state = any(%(applicable)s::text[]) and greatest(t.completed_at, t.failed_at, t.cancelled_at, t.expired_at) <= %(requested_at)s
            and ({fragment/task_filters})) is true as is_match,
        {fragment/refusal_of_ended} as refusal
    from (
        select t.* from {schema}.all_tasks t
        where {fragment/task_scope} and t.id > %(after)s
        order by t.id
        limit %(most)s
    ) t
    {fragment/last_event}
), {fragment/bulk_walk}
