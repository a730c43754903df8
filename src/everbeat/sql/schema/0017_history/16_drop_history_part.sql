-- Drop a partition of `history` whose tasks all ended before p_before. Return `dropped`, or `locked` if a lock was not free soon.
-- Return `needed` if it contains tasks of a workflow that still exists, because such a workflow can be retried. The first lock stops only writers of
-- this partition, so no task is added after the check. Readers and writers of `history` wait for the drop at most as long as the timeout.
create function {schema}.drop_history_part(p_name text, p_before timestamptz) returns text
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    v_part record;
    v_is_needed boolean;
begin
    if not {schema}.caller_can('DELETE', '{schema}.history') then
        raise insufficient_privilege using message = 'permission denied to drop a partition: it needs DELETE on the table history';
    end if;
    perform set_config('lock_timeout', '200ms', true);
    perform pg_advisory_xact_lock(hashtextextended('{schema} history', 0));
    select p.name, p.since, p.until into v_part from {schema}.history_parts p where p.name = p_name and p.until <= p_before;
    if not found then
        return 'dropped';
    end if;
    execute format('lock table only {schema}.%I in share row exclusive mode', v_part.name);
    execute format(
        'select exists (select from {schema}.workflows w where exists (select from {schema}.%I h where h.workflow_id = w.id))', v_part.name
    ) into v_is_needed;
    if v_is_needed then
        return 'needed';
    end if;
    execute format('drop table {schema}.%I', v_part.name);
    delete from {schema}.history_parts p where p.name = v_part.name;
    return 'dropped';
exception when lock_not_available then
    return 'locked';
end
$$
