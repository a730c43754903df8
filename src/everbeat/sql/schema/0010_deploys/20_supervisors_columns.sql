-- How many worker processes a supervisor keeps, why it cannot start one, and since when. Null for supervisors that do not record it.
alter table {schema}.supervisors add column processes integer, add column start_problem text, add column start_problem_at timestamptz
