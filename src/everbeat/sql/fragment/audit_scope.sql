-- The entries of the audit log since a time and behind the entry `before`, or behind the one before it if that has been deleted.
l.at >= coalesce(%(since)s::timestamptz, statement_timestamp() - %(within_ms)s::bigint * interval '1 millisecond', '-infinity')
  and (l.at, l.id) < (
      case when %(before)s::bigint is null then 'infinity' else (
          select b.at from {schema}.audit_log b where b.id <= %(before)s::bigint order by b.id desc limit 1
      ) end,
      coalesce(%(before)s::bigint, 9223372036854775807)
  )
