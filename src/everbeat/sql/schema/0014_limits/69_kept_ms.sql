-- How long a result is kept, in milliseconds, as text. Null if the policy sets no such time. The text of the policy is searched,
-- because operators of JSON raise an error for a policy with a damaged string. The index would then reject the end of the task.
create function {schema}.kept_ms(policy json) returns text language sql immutable as $$
    select substring(policy::text from '"keep_result_ms" ?: ?([0-9]{{1,12}})[,}}]')
$$
