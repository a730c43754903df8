-- The incarnation of the server on which a supervisor last took its session lock, and the role with which its tree connects.
alter table {schema}.supervisors add column session_server text, add column session_role oid
