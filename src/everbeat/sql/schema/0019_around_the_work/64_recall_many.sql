-- Move tasks back before they are retried. If p_ids is null, they are the tasks of the workflows p_workflows, which are locked first.
-- Otherwise, they are those of the tasks p_ids that a retry can run again. Of two sessions, the second waits for the first and then finds nothing. Return how many tasks moved.
create function {schema}.recall_many(p_ids uuid[], p_workflows uuid[]) returns bigint language plpgsql as $$
declare
    v_moved bigint;
begin
    perform from {schema}.workflows w where w.id = any(p_workflows) order by w.id for no key update;
    execute format(
        $back$
        with back as (
            delete from {schema}.history h
            where %6$s
            returning h.*
        ), attempt as (
            insert into {schema}.attempts (%2$s) select x.* from back b cross join lateral unnest(b.attempts) x
        ), step as (
            insert into {schema}.steps (%3$s) select x.* from back b cross join lateral unnest(b.steps) x
        ), signal as (
            insert into {schema}.signals (%4$s) select x.* from back b cross join lateral unnest(b.signals) x
        ), recovery as (
            insert into {schema}.recoveries (%5$s) overriding system value select x.* from back b cross join lateral unnest(b.recoveries) x
        )
        insert into {schema}.tasks (%1$s) select %1$s from back order by id
        $back$,
        {schema}.columns_of('{schema}.tasks', ''), {schema}.columns_of('{schema}.history_attempt', ''),
        {schema}.columns_of('{schema}.history_step', ''), {schema}.columns_of('{schema}.history_signal', ''),
        {schema}.columns_of('{schema}.history_recovery', ''),
        case
            when p_ids is null then 'h.workflow_id = any($2)'
            else 'h.id = any($1) and h.workflow_id is null and h.state in (''FAILED'', ''CANCELLED'', ''EXPIRED'')'
        end
    ) using p_ids, p_workflows;
    get diagnostics v_moved = row_count;
    return v_moved;
end
$$
