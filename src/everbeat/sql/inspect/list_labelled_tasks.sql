-- List tasks with labels, newest id first, as inspect/list_tasks: one step of a search. The step reads at most `most` rows of the rarest label. A row
-- of `labels` without its task is left out. The limit of 1 makes the planner look up each task by its id.
select {fragment/task_columns}
from (
{fragment/labelled_ids}
    limit %(most)s
) labelled
cross join lateral (select t.* from {schema}.all_tasks t where t.id = labelled.id limit 1) t
{fragment/last_event}
where {fragment/task_scope} and ({fragment/live_states}) and {fragment/task_filters}
order by labelled.key desc, labelled.value desc, labelled.id desc
limit %(limit)s
