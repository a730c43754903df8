-- Return the database of a user's connection, and mark its transaction, so that everbeat notices when the transaction ends. The statement
-- never fails.
select
    current_database()::text, current_user::text, to_regclass(%(installation)s) is not null as has_tables,
    current_setting('transaction_read_only') as read_only, current_setting('transaction_isolation') as isolation,
    set_config('everbeat.commit', %(mark)s, true) as mark
