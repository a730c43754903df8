-- The fields of a decided tick, for json_to_recordset.
at timestamptz, outcome text, reason text, detail text, task_id uuid, good_until timestamptz, is_serial boolean, cancels boolean,
    last_at timestamptz, missed bigint
