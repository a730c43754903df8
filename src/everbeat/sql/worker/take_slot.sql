-- Take a slot that no live supervisor occupies. Return no row if another supervisor occupies it, or if this supervisor was ended. If two
-- supervisors try to take a slot at the same time, the unique index rejects one of them.
update {schema}.supervisors s
set slot = %(slot)s
where s.id = %(id)s and s.ended_at is null
  and not exists (select from {schema}.supervisors o where o.slot = %(slot)s and o.ended_at is null and o.id <> s.id)
returning s.id
