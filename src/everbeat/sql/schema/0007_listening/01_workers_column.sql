-- Whether a worker wants notifications of due tasks. A worker that finds more tasks at each claim does not want them until shortly before
-- it becomes idle. Notifications are expensive: transactions that notify commit one after another.
alter table {schema}.workers add column listens boolean not null default true
