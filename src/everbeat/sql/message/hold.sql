-- The turn to publish, for `taken_ms` from now: whoever has it keeps it, others get it when it is over. Answers whether the caller has it.
-- A turn that ends later than one taken now would is free: the clock was set back since. clock_timestamp(), because this statement may have
-- begun before the one that took the turn.
with held as (
    update {schema}.relay r
    set holder = %(holder)s, taken_until = statement_timestamp() + %(taken_ms)s * interval '1 millisecond', channel = %(channel)s,
        listens = r.listens or r.holder is distinct from %(holder)s
    where r.holder = %(holder)s or r.taken_until <= statement_timestamp()
       or r.taken_until > clock_timestamp() + %(taken_ms)s * interval '1 millisecond'
    returning r.id
)
select exists (select from held)
