-- Lists of the audit log, and its retention, read a range of time.
create index {concurrently} audit_log_by_time on {schema}.audit_log (at, id)
