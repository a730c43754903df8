-- Whether a workflow is paused because its parent is: then it goes on with it. One that paused for its own reasons waits for somebody.
alter table {schema}.workflows add column is_held boolean not null default false
