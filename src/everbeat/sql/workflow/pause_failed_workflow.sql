-- Pause workflows that are set to pause on failure, after one of their nodes has failed: RUNNING -> PAUSED.
update {schema}.workflows w
set state = 'PAUSED', paused_at = statement_timestamp()
where w.id = any(%(ids)s::text::uuid[]) and w.state = 'RUNNING' and w.on_error = 'pause'
returning w.id
