-- Give the roles that can use the table of tasks the same rights on the peaks of depths. Without this, supervisors with such roles
-- could not write them.
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
            'grant %s on {schema}.depth_peaks to %s', given.privilege, given.role
        );
    end loop;
end
$$
