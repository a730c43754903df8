-- Delete all messages, between two measurements.
truncate {schema}.message_outbox
