-- Since when a tree is quiet: its workers claim nothing until an operator resumes them. Null: it is not.
alter table {schema}.supervisors add column quiet_since timestamptz
