-- Record the workflow that a task has started; it is recorded only once across all the task's attempts. The task's row was locked by
-- step/hold_parent. Return the recorded id.
insert into {schema}.steps as s (task_id, kind, name, result, attempt, digest)
select t.id, 'child', %(step)s::text, to_json(%(child_id)s::uuid), t.attempt, %(digest)s::text from {schema}.tasks t where t.id = %(id)s
on conflict (task_id, kind, name) do update set recorded_at = s.recorded_at
returning (s.result #>> '{{}}')::uuid as id
