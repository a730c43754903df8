-- Return the number of live and dead rows in the table of tasks, according to the server's statistics.
select s.n_live_tup, s.n_dead_tup, greatest(s.last_vacuum, s.last_autovacuum) as vacuumed_at
from pg_stat_user_tables s
where s.schemaname = %(schema)s and s.relname = 'tasks'
