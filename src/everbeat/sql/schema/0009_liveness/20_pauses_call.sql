-- The id of the call that paused: a call that is repeated after a lost reply recognises its own pause.
alter table {schema}.pauses add column call uuid
