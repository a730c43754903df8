-- The time at which a tree was made quiet: its workers claim nothing until an operator resumes them. Null if the tree is not quiet.
alter table {schema}.supervisors add column quiet_since timestamptz
