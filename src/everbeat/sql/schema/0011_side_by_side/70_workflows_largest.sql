-- The maximum size in bytes of one node's arguments as JSON, as set by the app that started the workflow. Null: the default.
alter table {schema}.workflows
    add column largest_arguments integer
