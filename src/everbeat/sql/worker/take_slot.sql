-- A supervisor takes a slot that no living one has; nothing when somebody has it, or when the supervisor itself was ended.
-- Of two that try at once the unique index refuses one.
update {schema}.supervisors s
set slot = %(slot)s
where s.id = %(id)s and s.ended_at is null
  and not exists (select from {schema}.supervisors o where o.slot = %(slot)s and o.ended_at is null and o.id <> s.id)
returning s.id
