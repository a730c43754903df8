-- End a supervisor. A supervisor that shuts down ends itself (without a watched heartbeat). An observer ends another supervisor by a
-- compare-and-swap on the heartbeat that the observer watched.
update {schema}.supervisors s
set ended_at = statement_timestamp(), ended_how = %(how)s
where s.id = %(supervisor_id)s and s.ended_at is null
  and (%(beat_seq)s::bigint is null or s.beat_seq = %(beat_seq)s)
  and (%(session_at)s::timestamptz is null or s.session_at = %(session_at)s)
returning s.id
