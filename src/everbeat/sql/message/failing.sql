-- Whether the stream takes nothing, so that senders tell the workers in its place.
update {schema}.relay set failing = %(failing)s where holder = %(holder)s and failing <> %(failing)s
