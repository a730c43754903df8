-- Create the partition for tasks that ended at p_at: the day or the month of p_at in UTC, without the days of other partitions. Return its
-- name, or null if a lock was not free soon. The table is created first and attached then, because this lock stops neither readers nor
-- writers of the other partitions. The partition gets the rights of `history`, because older code expects rights on every table.
create function {schema}.add_history_part(p_at timestamptz, p_unit text) returns text
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    v_name text;
    v_since timestamptz := date_trunc(p_unit, p_at at time zone 'UTC') at time zone 'UTC';
    v_until timestamptz := (date_trunc(p_unit, p_at at time zone 'UTC') + ('1 ' || p_unit)::interval) at time zone 'UTC';
    given record;
begin
    if not {schema}.caller_can('INSERT', '{schema}.history') then
        raise insufficient_privilege using message = 'permission denied to add a partition: it needs INSERT on the table history';
    end if;
    if p_unit not in ('day', 'month') then
        raise invalid_parameter_value using message = format('a partition is a day or a month, not %L', p_unit);
    end if;
    perform set_config('lock_timeout', '300ms', true);
    perform pg_advisory_xact_lock(hashtextextended('{schema} history', 0));
    select p.name into v_name from {schema}.history_parts p where p.since <= p_at and p_at < p.until;
    if found then
        return v_name;
    end if;
    v_since := greatest(v_since, (select max(p.until) from {schema}.history_parts p where p.until <= p_at));
    v_until := least(v_until, (select min(p.since) from {schema}.history_parts p where p.since > p_at));
    v_name := 'history_' || to_char(v_since at time zone 'UTC', 'YYYYMMDD');
    execute format('create table {schema}.%I (like {schema}.history including all)', v_name);
    for given in
        select distinct acl.privilege_type as privilege, case when acl.grantee = 0 then 'public' else quote_ident(r.rolname) end as role
        from pg_class c
        cross join lateral aclexplode(c.relacl) acl
        left join pg_roles r on r.oid = acl.grantee
        where c.oid = '{schema}.history'::regclass and acl.grantee <> c.relowner
          and acl.privilege_type in ('SELECT', 'INSERT', 'UPDATE', 'DELETE') and (acl.grantee = 0 or r.oid is not null)
    loop
        execute format('grant %s on {schema}.%I to %s', given.privilege, v_name, given.role);
    end loop;
    execute format('alter table {schema}.history attach partition {schema}.%I for values from (%L) to (%L)', v_name, v_since, v_until);
    insert into {schema}.history_parts (name, since, until) values (v_name, v_since, v_until);
    return v_name;
exception when lock_not_available then
    return null;
end
$$
