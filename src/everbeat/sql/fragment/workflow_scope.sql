-- The filters of `everbeat workflows` that an index serves. These are the task that started the workflow (workflows_by_parent_task), whether it has
-- ended (workflows_live), and the range of ids. Each other filter examines the workflows that these leave, one by one.
(%(parent)s::uuid is null or x.parent_task_id = %(parent)s::uuid)
  and (%(is_live)s::boolean is not true or x.state in ('RUNNING', 'PAUSED', 'CANCELLING'))
  and x.id >= %(first_id)s and x.id <= %(last_id)s
