-- The fields of a limit as store/limits.py writes them, for json_to_record and json_to_recordset.
name text, concurrency integer, starts integer, period_s double precision, burst integer, sliding boolean, fair boolean, weights json,
    when_full text, key text
