-- The id of the call that recovered, so that a call that is repeated after a lost reply recognizes its own recoveries.
alter table {schema}.recoveries add column call uuid
