-- Record how many worker processes a supervisor keeps running, and why it cannot start one, if applicable. The statement is idempotent and
-- runs only when one of these values changes.
update {schema}.supervisors s
set processes = %(processes)s, start_problem = %(problem)s::text,
    start_problem_at = case when %(problem)s::text is not null then statement_timestamp() - %(age_ms)s * interval '1 millisecond' end
where s.id = %(supervisor_id)s and s.ended_at is null
