-- Ends the turn of a cluster service before its time: whoever has it is done.
update {schema}.turns t
set taken_until = statement_timestamp()
where t.service = %(service)s and t.taken_by = %(taken_by)s and t.taken_until > statement_timestamp()
returning t.service
