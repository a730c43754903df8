-- Return a batch and its progress. The batch of a gather is not found.
select
{fragment/batch_columns}
from {schema}.batches b
{fragment/batch_progress}
where b.id = %(id)s and b.waiter_id is null
