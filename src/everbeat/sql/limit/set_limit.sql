-- Replace the numbers of a limit until an operator clears them, or until %(until)s. Other values stay as they are. Workers are notified, and
-- judge the waiting tasks by the new numbers. Return no row if the limit does not exist. The statement can be repeated.
with changed as (
    update {schema}.limits l
    set concurrency = case when %(sets_concurrency)s then %(concurrency)s::integer else l.concurrency end,
        starts = case when %(sets_rate)s then %(starts)s::integer else l.starts end,
        period_s = case when %(sets_rate)s then %(period_s)s::double precision else l.period_s end,
        burst = coalesce(%(burst)s::integer, l.burst),
        set_by = %(set_by)s, set_at = statement_timestamp(),
        reason = case when %(sets_reason)s then %(reason)s::text else l.reason end,
        until = case when %(sets_until)s then %(until)s::timestamptz else l.until end
    where l.name = %(name)s
    returning l.name
)
select c.name, case when (select pg_notification_queue_usage()) < 0.5 then pg_notify(%(channel)s, '*') end
from changed c
