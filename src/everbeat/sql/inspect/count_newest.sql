-- Count the newest tasks by state and by virtual state (see fragment/task_filters). The primary keys of `tasks` and `history` have their order. If
-- `examined` is at most `most`, these are all tasks, so every count is exact.
with newest as materialized (
    select t.state, t.enqueued_at, t.next_retry_at, t.wake_at, t.suspect
    from {schema}.all_tasks t
    order by t.id desc
    limit %(most)s::bigint + 1
)
select
    count(*) as examined, count(*) filter (where n.state = 'PENDING') as pending, count(*) filter (where n.state = 'RUNNING') as running,
    count(*) filter (where n.state = 'COMPLETED') as completed, count(*) filter (where n.state = 'FAILED') as failed,
    count(*) filter (where n.state = 'CANCELLED') as cancelled, count(*) filter (where n.state = 'EXPIRED') as expired,
    count(*) filter (where n.state = 'PENDING' and n.next_retry_at is not null) as retrying,
    count(*) filter (where n.state = 'PENDING' and n.enqueued_at > statement_timestamp() and n.next_retry_at is null and n.wake_at is null)
        as scheduled,
    count(*) filter (where n.state = 'PENDING' and n.enqueued_at > statement_timestamp() and n.wake_at > statement_timestamp()) as suspended,
    count(*) filter (where n.state = 'PENDING' and n.enqueued_at < statement_timestamp() - %(overdue_ms)s::bigint * interval '1 millisecond')
        as overdue,
    count(*) filter (where n.state in ('PENDING', 'CLAIMED', 'RUNNING') and n.suspect) as suspect
from newest n
