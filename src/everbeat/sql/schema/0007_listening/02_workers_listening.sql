-- Every send checks whether any worker is listening.
create index workers_listening on {schema}.workers (id) where listens and ended_at is null
