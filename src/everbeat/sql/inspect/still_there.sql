-- Which of these sessions, on which a client has hung up, the server still has.
select a.pid from pg_stat_activity a where a.pid = any (%(pids)s) and a.usename = session_user and a.state not like 'idle%%'
