-- The actions of operators that charts mark. Among hundreds of thousands of other actions of a month, they are few.
create index {concurrently} audit_log_marks on {schema}.audit_log (at, id) where action in ('pause', 'resume', 'set_limit', 'clear_limit')
