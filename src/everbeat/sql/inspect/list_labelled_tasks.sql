-- List tasks with labels, newest id first, as inspect/list_tasks: one step of a search. The step reads at most `most` rows of the rarest label. A row
-- of `labels` without its task is left out. The tasks are looked up together: so each partition of `history` is read once, and not for each id.
-- PostgreSQL sorts the ids once for each partition, which is quick only if they are in ascending order.
with labelled as materialized (
{fragment/labelled_ids}
    limit %(most)s
)
select {fragment/task_columns}
from {schema}.all_tasks t
{fragment/last_event}
where t.id = any(array(select l.id from labelled l order by l.id)) and {fragment/task_scope} and ({fragment/live_states}) and {fragment/task_filters}
order by t.id desc
limit %(limit)s
