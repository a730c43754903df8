-- Store parts of the captured logs of attempts, also after an attempt has ended or lost its lease. An attempt writes only the rows of its own
-- claim_id, so the statement needs no lease and locks no task. The parts are absolute: a repeated or late statement never replaces a newer state
-- of a part. The log of a deleted task is not stored. The primary keys of both tables serve the statement.
insert into {schema}.attempt_logs (task_id, attempt, claim_id, part, first, last, lines)
select p.task_id, p.attempt, p.claim_id, p.part, p.first, p.last, p.lines::json
from unnest(
    %(ids)s::uuid[], %(attempts)s::integer[], %(claim_ids)s::uuid[], %(parts)s::smallint[], %(firsts)s::integer[], %(lasts)s::integer[],
    %(lines)s::text[]
) as p (task_id, attempt, claim_id, part, first, last, lines)
where (select t.id from {schema}.tasks t where t.id = p.task_id) is not null
order by p.task_id, p.attempt, p.claim_id, p.part
on conflict (task_id, attempt, claim_id, part) do update
    set first = excluded.first, last = excluded.last, lines = excluded.lines, written_at = statement_timestamp()
    where (attempt_logs.first, attempt_logs.last) < (excluded.first, excluded.last)
