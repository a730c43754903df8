-- Whether any suspect that a worker might take is due.
select exists (
    select from {schema}.tasks t
    where t.state = 'PENDING' and t.suspect and t.needs_id is null and t.enqueued_at <= statement_timestamp() and t.fence < 9223372036854775807 and t.attempt < 2147483647
          and t.name = any(%(names)s::text[])
      and (%(queues)s::text[] is null or t.queue = any(%(queues)s::text[]))
)
