-- The filters of `everbeat recoveries` that an index of `history` serves.
h.recoveries is not null and (%(task_id)s::uuid is null or h.id = %(task_id)s)
  and (%(since)s::timestamptz is null or h.ended_at >= %(since)s)
  and (%(within_ms)s::bigint is null or h.ended_at >= statement_timestamp() - %(within_ms)s * interval '1 millisecond')
  and (%(ended_before)s::timestamptz is null or h.ended_at < %(ended_before)s)
