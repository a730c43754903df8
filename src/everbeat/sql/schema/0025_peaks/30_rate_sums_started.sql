-- The starts of each queue in a span, from which a page finds the busiest queues. It reads none of the wide rows with histograms.
create index {concurrently} rate_sums_started on {schema}.rate_sums (seconds, at, queue, started) where not is_total
