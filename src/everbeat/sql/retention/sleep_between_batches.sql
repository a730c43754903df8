-- Sleep between two batches, for a caller without a clock.
select pg_sleep(%(seconds)s)
