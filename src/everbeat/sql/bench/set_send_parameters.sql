-- Set the parameters of bench/send_in_server for this session.
select set_config('everbeat.sends', %(sends)s::text, false), set_config('everbeat.task', %(task)s, false)
