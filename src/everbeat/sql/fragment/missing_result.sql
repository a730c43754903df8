-- Why a completed task `t` has no result: its policy ignores results, or the result was removed.
case
        when t.state <> 'COMPLETED' or t.policy is null then null
        when t.policy ->> 'ignore_result' = 'true' then 'ignored'
        when t.result is null and position('"keep_result_ms"' in t.policy::text) > 0 then 'removed'
    end
