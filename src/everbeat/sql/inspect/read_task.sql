-- Return one task as stored. The batch of a gather is left out, because only its task knows it.
select {fragment/task_columns},
    statement_timestamp() as at, t.args::text, t.result::text, t.policy::text, t.flags::text, t.needs::text, t.schedule, t.tick,
    (select b.id from {schema}.batches b where b.id = t.batch_id and b.waiter_id is null) as batch_id
from {fragment/tasks_with_last_event}
where t.id = %(id)s
