-- The index for searches by label: one row for each label of a task or workflow. The labels themselves are stored with the task or workflow.
-- Rows are only added and deleted. Ids sort by time, so the primary key lists the tasks with a label from the newest to the oldest.
create table {schema}.labels (
    key    text not null,
    value  text not null,
    id     uuid not null,
    primary key (key, value, id)
)
