-- The fields of a definition as store/schedules.py writes them, for json_to_record and json_to_recordset.
name text, task text, args json, queue text, priority smallint, key text, policy json, flags json, serial text, expires_ms bigint,
    timing json, timezone text, starts_at timestamptz, ends_at timestamptz, most_runs integer, missed text, most integer, catchup_ms bigint,
    overlap text, jitter_ms bigint, pause_after_failures integer, note text, declaration text, gates text[], costs integer[], labels jsonb
