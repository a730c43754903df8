-- Results that are stored only for a time, by that time and by the end of their tasks. Retention removes them. The time is a text, because
-- an invalid number must not abort the end of a task. Tasks of workflows keep their results. Other tasks have no entry.
create index {concurrently} tasks_kept_results on {schema}.tasks (({schema}.kept_ms(policy)), completed_at)
    where state = 'COMPLETED' and workflow_id is null and result is not null and position('"keep_result_ms"' in policy::text) > 0
