-- Which PostgreSQL is measured.
select current_setting('server_version')
