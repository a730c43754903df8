-- The filters of `everbeat tasks` that an index serves: the parent, the workflow, the batch, and the range of ids. Each other filter examines the tasks
-- that these leave, one by one.
(%(parent)s::uuid is null or t.parent_id = %(parent)s)
  and (%(workflow)s::uuid is null or t.workflow_id = %(workflow)s)
  and (%(batch)s::uuid is null or t.batch_id = %(batch)s)
  and t.id >= %(first_id)s and t.id <= %(last_id)s
