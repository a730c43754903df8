-- What a suspended task waits for (null: for its time only), and when it is due at the latest. They stand while the code that
-- will be suspended still runs, so that a signal finds them, and are cleared when an attempt ends otherwise.
alter table {schema}.tasks
    add column waits_for text, add column wake_at timestamptz
