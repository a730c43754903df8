-- All workers that have a row, newest first: which of them an operator may mean.
select w.id, w.ended_at is not null as is_ended from {schema}.workers w order by w.started_at desc, w.id limit 10000
