-- Return whether any completed task has a result that retention removes after a time. The index of such results answers this at once. Also
-- return true if any line, gate, rate, sum of rates, depth, peak of depths or captured log exists.
select exists (
    select from {schema}.tasks t
    where t.state = 'COMPLETED' and t.workflow_id is null and t.result is not null and position('"keep_result_ms"' in t.policy::text) > 0
) or exists (select from {schema}.lines) or exists (select from {schema}.gates) or exists (select from {schema}.rates)
    or exists (select from {schema}.rate_sums) or exists (select from {schema}.depths) or exists (select from {schema}.depth_peaks)
    or exists (select from {schema}.attempt_logs) as keeps
