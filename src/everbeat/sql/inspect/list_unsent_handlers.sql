-- List recently failed tasks whose failure handler was not sent, newest first. That happens only if a policy was changed by hand. Records are
-- kept for at least an hour, so within this time no handler has been deleted. The statement reads a limited number of tasks through an
-- index (tasks_failed, history_failed), newest first, and looks each handler up by its id.
with recent as materialized (
    select t.id, t.fence, t.failed_at, t.policy from {schema}.all_tasks t
    where t.state = 'FAILED' and t.failed_at > statement_timestamp() - %(within_ms)s * interval '1 millisecond'
      and t.failed_at <= statement_timestamp()
    order by t.failed_at desc
    limit %(most)s
), expected as materialized (
    select r.id, r.failed_at, {schema}.handler_id(r.id, r.fence, r.failed_at) as handler
    from recent r
    where position('"on_failure"' in r.policy::text) > 0
      and coalesce(jsonb_typeof({schema}.object_of(r.policy) -> 'on_failure'), case when {schema}.object_of(r.policy) is null then 'object' end) = 'object'
)
select e.id from expected e
where (select t.id from {schema}.tasks t where t.id = e.handler) is null
  and (select h.id from {schema}.history h where h.id = e.handler) is null
order by e.failed_at desc
