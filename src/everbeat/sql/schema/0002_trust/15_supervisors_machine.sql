-- The machine of a supervisor, as a digest. A supervisor is dead if its machine has been rebooted since.
alter table {schema}.supervisors add column machine_id text
