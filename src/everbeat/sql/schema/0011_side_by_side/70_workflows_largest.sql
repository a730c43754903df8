-- The most that the arguments of one node take as JSON, by the app that started the workflow. Null: the default.
alter table {schema}.workflows
    add column largest_arguments integer
