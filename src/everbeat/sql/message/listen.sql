-- Whether the relay has use for being told of each new row.
update {schema}.relay set listens = %(listens)s where holder = %(holder)s and listens <> %(listens)s
