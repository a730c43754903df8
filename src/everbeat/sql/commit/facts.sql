-- Where a connection of the user's leads; marks its transaction, so that its end is noticed. Fails nowhere.
select
    current_database()::text, current_user::text, to_regclass(%(installation)s) is not null as has_tables,
    current_setting('transaction_read_only') as read_only, current_setting('transaction_isolation') as isolation,
    set_config('everbeat.commit', %(mark)s, true) as mark
