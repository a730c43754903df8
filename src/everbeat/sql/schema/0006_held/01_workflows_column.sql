-- Whether a workflow is paused because its parent is. If so, it resumes with its parent; any other paused workflow waits for an operator.
alter table {schema}.workflows add column is_held boolean not null default false
