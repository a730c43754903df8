-- Whether a commit is on disk when it is acknowledged.
select current_setting('fsync') = 'on' as fsync, current_setting('synchronous_commit') <> 'off' as synchronous_commit
