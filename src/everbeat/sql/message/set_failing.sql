-- Record whether the stream is rejecting all messages; if so, senders notify the workers instead.
update {schema}.relay set failing = %(failing)s where holder = %(holder)s and failing <> %(failing)s
