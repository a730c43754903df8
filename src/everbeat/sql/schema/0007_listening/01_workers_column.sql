-- Whether a worker has use for hints that tasks are due. One that finds more whenever it looks says that it has none, and says so again
-- before it rests: a notification makes transactions commit one after another.
alter table {schema}.workers add column listens boolean not null default true
