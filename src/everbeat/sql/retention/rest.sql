-- Lets some time pass between two batches, for whoever has no clock to wait by.
select pg_sleep(%(seconds)s)
