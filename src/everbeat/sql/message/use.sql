-- Turns messages on, for good; answers whether they had been in use before.
select {schema}.use_messages(%(channel)s)
