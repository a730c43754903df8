-- Record the heartbeat of a worker whose supervisor is silent. Return no row if the worker was ended.
update {schema}.workers w
set beat_seq = w.beat_seq %% 9223372036854775807 + 1, last_beat_at = statement_timestamp()
where w.id = %(worker_id)s and w.ended_at is null
returning w.beat_seq
