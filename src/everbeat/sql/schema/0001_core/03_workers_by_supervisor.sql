-- Finds the workers of a supervisor.
create index workers_by_supervisor on {schema}.workers (supervisor_id)
