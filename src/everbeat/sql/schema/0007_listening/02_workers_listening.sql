-- Whether anybody has: asked by every send.
create index workers_listening on {schema}.workers (id) where listens and ended_at is null
