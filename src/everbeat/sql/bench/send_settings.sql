-- What bench/send_loop is to do on this connection.
select set_config('everbeat.sends', %(sends)s::text, false), set_config('everbeat.task', %(task)s, false),
    set_config('everbeat.told_on', %(channel)s, false)
