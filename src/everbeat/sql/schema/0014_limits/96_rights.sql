-- Give the roles that can use the table of tasks the same rights on the new tables. Without this, workers and senders with such
-- roles would fail. Each role that can use the schema can read the floor of the changes, which is a transaction id, because every claim does.
do $$
declare
    given record;
begin
    for given in
        select distinct acl.privilege_type as privilege, case when acl.grantee = 0 then 'public' else quote_ident(r.rolname) end as role
        from pg_class c
        cross join lateral aclexplode(c.relacl) acl
        left join pg_roles r on r.oid = acl.grantee
        where c.oid = '{schema}.tasks'::regclass and acl.grantee <> c.relowner
          and acl.privilege_type in ('SELECT', 'INSERT', 'UPDATE', 'DELETE') and (acl.grantee = 0 or r.oid is not null)
    loop
        execute format(
            'grant %s on {schema}.limits, {schema}.gates, {schema}.lines, {schema}.line_changes, {schema}.unique_keys to %s', given.privilege, given.role
        );
    end loop;
    grant select on sequence {schema}.line_changes_floor to public;
end
$$
