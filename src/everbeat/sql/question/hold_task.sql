-- Lock a task before its question is answered. Of two answers, the second one waits here. Then question/list_asked runs in the same transaction
-- with a new snapshot, and finds the first answer. If there is no row, the task is not in the table. Lock order: only the task.
select t.id from {schema}.tasks t where t.id = %(id)s for no key update
