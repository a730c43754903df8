-- At most one live supervisor occupies a slot.
create unique index supervisors_slot on {schema}.supervisors (slot) where slot is not null and ended_at is null
