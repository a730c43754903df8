-- Record whether the relay wants to be notified of each new row.
update {schema}.relay set listens = %(listens)s where holder = %(holder)s and listens <> %(listens)s
