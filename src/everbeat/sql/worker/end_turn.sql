-- Ends the turn of a cluster service before its time: its holder is done. It is over for every clock.
update {schema}.turns t
set taken_until = '-infinity'
where t.service = %(service)s and t.taken_by = %(taken_by)s and t.taken_until > '-infinity'
returning t.service
