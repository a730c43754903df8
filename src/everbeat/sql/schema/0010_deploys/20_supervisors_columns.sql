-- The number of worker processes that a supervisor keeps running, the reason why it cannot start one, and since when. Null for supervisors
-- that do not record these facts.
alter table {schema}.supervisors add column processes integer, add column start_problem text, add column start_problem_at timestamptz
