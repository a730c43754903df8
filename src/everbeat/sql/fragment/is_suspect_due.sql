-- Whether a suspect that this worker can take is due: an unmarked suspect, or one from the groups in `marked`.
exists (
    select from {schema}.tasks t
    where t.state = 'PENDING' and t.suspect
      and (not {schema}.is_marked(t.needs) or t.needs_id = any(array(select m.needs_id from json_to_recordset(%(marked)s::json) as m (needs_id uuid))))
      and t.enqueued_at <= statement_timestamp() and t.fence < 9223372036854775807 and t.attempt < 2147483647
      and t.name = any(%(names)s::text[])
      and (%(queues)s::text[] is null or t.queue = any(%(queues)s::text[]))
)
