-- List the queues with live tasks. For each queue, return how many tasks are due, scheduled, claimed and running, and how long the oldest
-- due task has been waiting. Counting stops at `most` tasks of a queue and state. `at_least` names the counts that can be too low.
-- series/sample_depths stores the same counts.
with recursive {fragment/queue_counts}
select
    c.queue, c.pending, c.later as scheduled, c.claimed, c.running, c.oldest_due_s,
    array_remove(array[
        case when c.has_more_pending then 'pending' end, case when c.has_more_later then 'scheduled' end,
        case when c.has_more_claimed then 'claimed' end, case when c.has_more_running then 'running' end
    ], null) as at_least
from queue_count c
order by c.queue
