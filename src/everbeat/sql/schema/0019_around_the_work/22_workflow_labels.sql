-- The labels of a workflow, an object of texts. The tasks of its nodes inherit them.
alter table {schema}.workflows add column labels jsonb
