-- The id of the call that paused, so that a call that is repeated after a lost reply recognizes its own pause.
alter table {schema}.pauses add column call uuid
