-- On which incarnation of the server a supervisor last took its session lock, and with which role its tree connects.
alter table {schema}.supervisors add column session_server text, add column session_role oid
