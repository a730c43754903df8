-- How a worker stands with what carries its messages.
alter table {schema}.worker_states add column messages json
