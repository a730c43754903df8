-- Live workflows, for the reconciler.
create index workflows_live on {schema}.workflows (id) where state in ('RUNNING', 'PAUSED', 'CANCELLING')
