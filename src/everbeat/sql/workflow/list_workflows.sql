-- List the latest workflows, filtered by name, state, key, the task that started them, their labels, or the time of their last event. Only the
-- filter by task has an index. The statement reads the primary key backwards until the page is full, or until it has examined `most` workflows
-- (null: all). Those that have not ended have their own index (workflows_live). The next page begins below `last_id`.
select
    w.id, w.name, w.key, w.state, w.on_error, w.node_count, w.output, w.parent_id, w.parent_node, w.parent_task_id, w.sent_at, w.paused_at, w.cancel_requested_at,
    w.ended_at, null::text as result, w.error::text as error, null::text as output_name,
    (
        select json_object_agg(c.state, c.count)::text
        from (select n.state, count(*) as count from {schema}.nodes n where n.workflow_id = w.id group by n.state) c
    ) as counts,
    w.labels::text as labels
from (
    select x.* from {schema}.workflows x
    where {fragment/workflow_scope}
    order by x.id desc
    limit %(most)s
) w
where (%(name)s::text is null or w.name = %(name)s::text) and (%(state)s::text is null or w.state = %(state)s::text)
  and (%(key)s::text is null or w.key = %(key)s::text) and (%(roots)s::boolean is not true or w.parent_id is null)
  and (%(since)s::timestamptz is null or greatest(w.sent_at, w.paused_at, w.cancel_requested_at, w.ended_at) >= %(since)s)
  and (
      %(within_ms)s::bigint is null
      or greatest(w.sent_at, w.paused_at, w.cancel_requested_at, w.ended_at) >= statement_timestamp() - %(within_ms)s * interval '1 millisecond'
  )
  and (%(until)s::timestamptz is null or greatest(w.sent_at, w.paused_at, w.cancel_requested_at, w.ended_at) < %(until)s)
  and (
      %(before_ms)s::bigint is null
      or greatest(w.sent_at, w.paused_at, w.cancel_requested_at, w.ended_at) < statement_timestamp() - %(before_ms)s * interval '1 millisecond'
  )
  and (%(labels)s::text is null or w.labels @> %(labels)s::text::jsonb)
  and (%(label_keys)s::text[] is null or w.labels ?& %(label_keys)s::text[])
order by w.id desc
limit %(limit)s
