-- List the heartbeats of `window_ms` before a moment, oldest first, at most `limit` of them (the newest). They are found by beats_by_time.
select b.supervisor_id, b.seq, b.sent_at, b.held
from (
    select b.supervisor_id, b.seq, b.sent_at, b.held
    from {schema}.beats b
    where b.sent_at > %(at)s::timestamptz - %(window_ms)s * interval '1 millisecond' and b.sent_at <= %(at)s
    order by b.sent_at desc
    limit %(limit)s
) b
order by b.sent_at, b.seq
