-- The carrier of a workflow, in the form of tasks.context. Each task of the workflow gets it.
alter table {schema}.workflows add column context json
