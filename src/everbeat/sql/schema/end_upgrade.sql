-- Release the lock and restore the settings of a session that upgraded.
select pg_advisory_unlock(%(lock_key)s), (
    select count(set_config(s.name, case s.name when 'idle_session_timeout' then '0' else s.reset_val end, false))
    from pg_settings s
    where s.name in ('statement_timeout', 'transaction_timeout', 'lock_timeout', 'idle_session_timeout')
)
