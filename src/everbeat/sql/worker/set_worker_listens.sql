-- Record whether a worker wants to be notified of due tasks.
update {schema}.workers w set listens = %(listens)s where w.id = %(worker_id)s and w.listens <> %(listens)s
