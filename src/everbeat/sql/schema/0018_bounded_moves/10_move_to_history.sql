-- Move the tasks that ended at least p_age ago, with their records: one step of a scan of the primary key. The step reads at most p_most
-- tasks. A task stays if
-- - it ended before p_kept, because retention deletes it soon (null: never);
-- - its workflow has not ended, because the nodes read its result, or a retry has locked the workflow;
-- - its parent has not ended;
-- - its key is taken, because the row of the key would be deleted with it;
-- - its result is stored only for a time, which has not passed;
-- - another session has locked it, for example to retry it;
-- - its records are larger than 256 MB, because a row of `history` contains them all, and no value can be larger than 1 GB.
-- A step moves at most 32 MB as stored, and at most 128 MB of records, or one larger task. It ends there, so that it does not take too long.
-- The sizes are measured in two rounds. The first one takes them as stored, which reads no large value. The second one takes the remaining
-- tasks, and measures their records as they will be in the arrays. An array contains large values uncompressed, up to 255 times as large.
-- The second round is left out if this cannot matter.
-- Tasks move only if all live trees know `history`. This must be a function, so that each of its statements sees all earlier commits. So the
-- last one finds each record of the tasks that are locked. The columns come from the catalog (see columns_of). Lock order: workflows, then tasks by id.
-- Return the position at which the next step begins (null: the end), how many tasks moved, and an end for which there is no partition yet.
create or replace function {schema}.move_to_history(p_after uuid, p_until uuid, p_most integer, p_age interval, p_kept timestamptz)
returns table (next_after uuid, moved bigint, lacks timestamptz) language plpgsql as $$
declare
    v_last uuid;
    v_has_more boolean;
    v_ids uuid[];
    v_workflows uuid[];
    v_candidates integer;
    v_decided integer;
    v_in_arrays boolean;
    v_in_records bigint;
begin
    moved := 0;
    if exists (select from {schema}.supervisors s where s.ended_at is null and coalesce(s.code, 0) < 17) then
        return next;
        return;
    end if;
    with looked as materialized (
        select t.id from {schema}.tasks t where t.id > p_after and t.id < p_until order by t.id limit p_most
    )
    select (select l.id from looked l order by l.id desc limit 1), count(*) = p_most into v_last, v_has_more
    from looked;
    next_after := case when v_has_more then v_last end;
    select array_agg(t.id), array_agg(distinct t.workflow_id) into v_ids, v_workflows
    from {schema}.tasks t
    where t.id > p_after and t.id <= v_last and t.state in ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED')
      and {schema}.plausible(greatest(t.completed_at, t.failed_at, t.cancelled_at, t.expired_at)) <= statement_timestamp() - p_age;
    select array_agg(l.id) into v_workflows
    from (select w.id from {schema}.workflows w where w.id = any(v_workflows) and w.ended_at is not null order by w.id for share skip locked) l;
    -- The subqueries `(select …)` look up one row each; `not exists` can become a scan of a whole table.
    select array_agg(l.id), min(l.ended_at) filter (where not l.has_part) into v_ids, lacks
    from (
        select t.id, e.at as ended_at, (select p.name from {schema}.history_parts p where p.since <= e.at and e.at < p.until) is not null as has_part
        from {schema}.tasks t
        cross join lateral (select {schema}.plausible(greatest(t.completed_at, t.failed_at, t.cancelled_at, t.expired_at)) as at) e
        where t.id = any(v_ids) and t.state in ('COMPLETED', 'FAILED', 'CANCELLED', 'EXPIRED')
          and e.at <= statement_timestamp() - p_age and (p_kept is null or e.at >= p_kept)
          and (
              t.workflow_id is null or t.workflow_id = any(v_workflows)
              or (select w.id from {schema}.workflows w where w.id = t.workflow_id) is null
          )
          and coalesce((select p.state from {schema}.tasks p where p.id = t.parent_id), '') not in ('PENDING', 'CLAIMED', 'RUNNING')
          and case when t.unique_key is not null then (
              select u.task_id from {schema}.unique_keys u
              where u.name = t.name and u.key = t.unique_key and u.task_id = t.id and (u.until is null or u.until > statement_timestamp())
          ) end is null
          and not (t.state = 'COMPLETED' and t.workflow_id is null and t.result is not null and position('"keep_result_ms"' in t.policy::text) > 0)
            is true
        order by t.id
        for update of t skip locked
    ) l;
    if lacks is not null or v_ids is null then
        return next;
        return;
    end if;
    foreach v_in_arrays in array array[false, true] loop
        v_candidates := cardinality(v_ids);
        -- `number`, `bytes` and `in_records`: how much the step moves if it ends with this task. They only grow, so the step ends with the
        -- last task for which there is room.
        select array_agg(s.id order by s.id) filter (where not s.stays), count(*), (array_agg(s.id order by s.id desc))[1], max(s.in_records)
        into v_ids, v_decided, v_last, v_in_records
        from (
            select e.id, e.stays, count(*) filter (where not e.stays) over up_to as number,
                sum(e.bytes) filter (where not e.stays) over up_to as bytes, sum(e.in_records) filter (where not e.stays) over up_to as in_records
            from (
                select b.id, sum(b.bytes) as bytes, coalesce(sum(b.bytes) filter (where b.is_record), 0) as in_records,
                    coalesce(sum(b.bytes) filter (where b.is_record), 0) > 268435456 as stays
                from (
                    select t.id, false as is_record, coalesce(pg_column_size(t.args), 0) + coalesce(pg_column_size(t.result), 0)
                        + coalesce(pg_column_size(t.checkpoint), 0) + coalesce(pg_column_size(t.error), 0) as bytes
                    from {schema}.tasks t where t.id = any(v_ids)
                    union all
                    select x.task_id, true, case when v_in_arrays then pg_column_size(row(x.*)) else 100 + coalesce(pg_column_size(x.error), 0) end
                    from {schema}.attempts x where x.task_id = any(v_ids)
                    union all
                    select x.task_id, true, case when v_in_arrays then pg_column_size(row(x.*)) else 100 + coalesce(pg_column_size(x.result), 0) end
                    from {schema}.steps x where x.task_id = any(v_ids)
                    union all
                    select x.target, true, case when v_in_arrays then pg_column_size(row(x.*)) else 100 + coalesce(pg_column_size(x.value), 0) end
                    from {schema}.signals x where x.target = any(v_ids)
                    union all
                    select x.task_id, true, case when v_in_arrays then pg_column_size(row(x.*)) else 100 + coalesce(pg_column_size(x.certificate), 0) end
                    from {schema}.recoveries x where x.task_id = any(v_ids)
                ) b
                group by b.id
            ) e
            window up_to as (order by e.id)
        ) s
        where s.number <= 1 or (not v_in_arrays and s.bytes <= 33554432) or (v_in_arrays and s.in_records <= 134217728);
        if v_decided < v_candidates then
            next_after := v_last;
        end if;
        exit when v_in_records * 255 <= 134217728;
    end loop;
    if v_ids is null then
        return next;
        return;
    end if;
    execute format(
        $move$
        with attempt as (
            delete from {schema}.attempts x where x.task_id = any($1)
            returning x.task_id as id, row(%2$s)::{schema}.history_attempt as one
        ), step as (
            delete from {schema}.steps x where x.task_id = any($1)
            returning x.task_id as id, row(%3$s)::{schema}.history_step as one
        ), signal as (
            delete from {schema}.signals x where x.target = any($1)
            returning x.target as id, row(%4$s)::{schema}.history_signal as one
        ), recovery as (
            delete from {schema}.recoveries x where x.task_id = any($1)
            returning x.task_id as id, row(%5$s)::{schema}.history_recovery as one
        ), gone as (
            delete from {schema}.tasks t where t.id = any($1) returning t.*
        )
        insert into {schema}.history (%1$s, ended_at, attempts, steps, signals, recoveries)
        select %1$s, greatest(completed_at, failed_at, cancelled_at, expired_at), of_attempt.rows, of_step.rows, of_signal.rows, of_recovery.rows
        from gone
        left join (select x.id, array_agg(x.one order by (x.one).attempt) from attempt x group by x.id) of_attempt (task, rows) on of_attempt.task = id
        left join (select x.id, array_agg(x.one order by (x.one).kind, (x.one).name) from step x group by x.id) of_step (task, rows) on of_step.task = id
        left join (select x.id, array_agg(x.one order by (x.one).sent_at, (x.one).id) from signal x group by x.id) of_signal (task, rows) on of_signal.task = id
        left join (select x.id, array_agg(x.one order by (x.one).id) from recovery x group by x.id) of_recovery (task, rows) on of_recovery.task = id
        $move$,
        {schema}.columns_of('{schema}.tasks', ''), {schema}.columns_of('{schema}.attempts', 'x.'), {schema}.columns_of('{schema}.steps', 'x.'),
        {schema}.columns_of('{schema}.signals', 'x.'), {schema}.columns_of('{schema}.recoveries', 'x.')
    ) using v_ids;
    get diagnostics moved = row_count;
    return next;
end
$$
