-- Count the events of batches, and end the batches whose tasks have all ended. The function is defined in
-- schema/0019_around_the_work/58_advance_batches, and sends the notifications. Return how many batches had events, how many ended, and how many
-- tasks are now due.
select advanced, ended, enqueued from {schema}.advance_batches(%(channel)s::text, %(most)s)
