-- Return the newest batches before an id, without the batches of gathers. The ids begin with the time of their creation.
select
{fragment/batch_columns}
from (
    select * from {schema}.batches b
    where b.waiter_id is null and (%(before)s::uuid is null or b.id < %(before)s::uuid) and (not %(live_only)s or b.ended_at is null)
    order by b.id desc
    limit %(limit)s
) b
{fragment/batch_progress}
order by b.id desc
