-- Release the turn of a cluster service early, because its holder has finished. Every clock then considers the turn over.
update {schema}.turns t
set taken_until = '-infinity'
where t.service = %(service)s and t.taken_by = %(taken_by)s and t.taken_until > '-infinity'
returning t.service
