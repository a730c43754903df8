-- A worker says whether it has use for hints that tasks are due.
update {schema}.workers w set listens = %(listens)s where w.id = %(worker_id)s and w.listens <> %(listens)s
