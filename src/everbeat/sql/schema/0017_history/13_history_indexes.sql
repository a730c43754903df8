-- Find the tasks of a workflow, the children of a task, the newest failed tasks, and the tasks that were recovered. The table is empty, so
-- building its indexes blocks nothing.
do $$
begin
    create index history_by_workflow on {schema}.history (workflow_id) where workflow_id is not null;
    create index history_by_parent on {schema}.history (parent_id) where parent_id is not null;
    create index history_failed on {schema}.history (failed_at) where state = 'FAILED';
    create index history_recovered on {schema}.history (ended_at) where recoveries is not null;
end
$$
