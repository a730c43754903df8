-- Between two measurements: what was to be told by messages.
truncate {schema}.message_outbox
