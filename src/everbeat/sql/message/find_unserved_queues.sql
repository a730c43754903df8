-- Return which of these queues no live worker serves through NATS. A worker without a snapshot counts as serving the queues, because it has
-- only just started.
select q.name
from unnest(%(queues)s::text[]) as q (name)
where not exists (
    select from {schema}.workers w
    left join lateral (
        select x.messages, true as is_known from {schema}.worker_states x where x.worker_id = w.id order by x.at desc limit 1
    ) s on true
    where w.ended_at is null and (w.queues is null or q.name = any(w.queues))
      and (s.is_known is null or (s.messages is not null and s.messages ->> 'up' is distinct from 'false'))
)
order by q.name
