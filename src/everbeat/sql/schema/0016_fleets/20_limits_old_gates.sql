-- Early copies of version 15 lack this column. The steps until 24 give such a database what version 15 has now, and change nothing elsewhere.
alter table {schema}.limits add column if not exists has_old_gates boolean not null default false
