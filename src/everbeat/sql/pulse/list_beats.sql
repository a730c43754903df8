-- List the heartbeats of the last `window_ms` that are stored, oldest first, at most `limit` of them (the newest). They are found by
-- beats_by_time. The sequence number distinguishes the heartbeats of a supervisor.
select b.supervisor_id, b.seq, b.sent_at, b.held
from (
    select b.supervisor_id, b.seq, b.sent_at, b.held
    from {schema}.beats b
    where b.sent_at > statement_timestamp() - %(window_ms)s * interval '1 millisecond'
    order by b.sent_at desc
    limit %(limit)s
) b
order by b.sent_at, b.seq
