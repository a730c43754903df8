-- Which machine a supervisor ran on, as a digest: with another boot of the same machine it is dead.
alter table {schema}.supervisors add column machine_id text
