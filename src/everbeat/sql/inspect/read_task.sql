-- Return one task as stored.
select {fragment/task_columns},
    statement_timestamp() as at, t.args::text, t.result::text, t.policy::text, t.flags::text, t.needs::text, t.schedule, t.tick
from {fragment/tasks_with_last_event}
where t.id = %(id)s
