-- Ends the earlier backends of this session that wait for their client, and returns whether the session must wait. It waits for a backend
-- that waits for a synchronous standby: a repeated statement would wait as well, and to end that backend would show what the standby
-- might lose. It also waits while two earlier backends are left for any reason.
select coalesce(bool_or(old.wait_event = 'SyncRep'), false) or count(*) > 1 as must_wait
from (
    select a.wait_event, case when a.wait_event_type = 'Client' then pg_terminate_backend(a.pid) end as ended
    from pg_stat_activity a
    where a.application_name = current_setting('application_name') and a.pid <> pg_backend_pid()
      and a.usename = session_user and a.datname = current_database()
) old
