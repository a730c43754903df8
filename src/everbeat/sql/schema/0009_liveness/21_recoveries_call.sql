-- The id of the call that recovered: a call that is repeated after a lost reply recognises its own recoveries.
alter table {schema}.recoveries add column call uuid
