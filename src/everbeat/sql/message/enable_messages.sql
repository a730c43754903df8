-- Enable messages permanently. Return whether they were already in use.
select {schema}.use_messages(%(channel)s)
