-- A time, or infinity. In a column of the type timestamptz, infinity is a value that everbeat never writes.
create domain {schema}.endless as timestamptz
