-- Take or keep the publishing turn for `taken_ms` from now. When the turn is over, another worker can take it. Return whether the caller
-- has the turn. If the stored turn ends later than a turn taken now would end, it counts as released: the clock has been set back since.
-- `clock_timestamp()` is used because this statement might have begun before the statement that took the turn.
with held as (
    update {schema}.relay r
    set holder = %(holder)s, taken_until = statement_timestamp() + %(taken_ms)s * interval '1 millisecond', channel = %(channel)s,
        listens = r.listens or r.holder is distinct from %(holder)s
    where r.holder = %(holder)s or r.taken_until <= statement_timestamp()
       or r.taken_until > clock_timestamp() + %(taken_ms)s * interval '1 millisecond'
    returning r.id
)
select exists (select from held)
