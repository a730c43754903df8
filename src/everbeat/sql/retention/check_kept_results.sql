-- Return whether any completed task has a result that retention removes after a time. The index of such results answers this at once.
select exists (
    select from {schema}.tasks t
    where t.state = 'COMPLETED' and t.workflow_id is null and t.result is not null and t.policy ->> 'keep_result_ms' is not null
) as keeps
