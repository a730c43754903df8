-- Return whether a line of tasks with limits is ready for this caller. A claim takes such tasks only if their code can start at once.
select exists (
    select from {schema}.lines l
    where l.state = 'R' and l.gates is not null and l.suspect = any(%(suspects)s::boolean[]) and l.reader = any(%(readers)s::text[])
      and (%(queues)s::text[] is null or l.queue = any(%(queues)s::text[]))
) as is_ready
