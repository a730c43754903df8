-- End a turn to watch, so that another supervisor can take it at once. The time is not -infinity, because take_watch_turn deletes turns that
-- ended long ago in the statement that takes another one.
update {schema}.turns t
set taken_until = statement_timestamp()
where t.service = %(turn)s and t.taken_by = %(taken_by)s and t.taken_until > statement_timestamp()
returning t.service
