-- Finds the attempts of at least one second that ran at a moment. Most attempts are shorter, and have no entry. The bounds keep values that
-- another program has written from failing the subtraction.
create index {concurrently} attempts_long on {schema}.attempts using gist (tstzrange(started_at, ended_at))
    where started_at >= timestamptz '2000-01-01 00:00+00' and ended_at < timestamptz '3000-01-01 00:00+00'
      and ended_at - started_at >= interval '1 second'
