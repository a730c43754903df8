-- Return the tasks of a portion that still exist, and were therefore locked. For an action on ended tasks, they can be in `history`.
select t.id from {schema}.tasks t where t.id = any(%(ids)s::text::uuid[])
union all
select h.id from {schema}.history h where %(is_of_ended)s and h.id = any(%(ids)s::text::uuid[])
