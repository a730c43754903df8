-- Decide about nodes whose dependencies have changed. A node is ready when no edge that it needs is open or unmet and its quorum is met. A
-- node is SKIPPED as soon as it can no longer become ready. A map ends when all its members have ended. Consequences for other nodes follow
-- in turn from the outbox. Return the ready nodes. Counting stops as soon as the quorum is met.
with candidate as materialized (
    select
        n.workflow_id, n.number, n.kind, n.state, n.quorum, n.first_member, n.members,
        n.template is not null or n.items is not null or n.kind = 'workflow' as composed
    from (select distinct a.* from unnest(%(ids)s::text::uuid[], %(numbers)s::text::integer[]) as a (workflow_id, number)) a
    join {schema}.nodes n on n.workflow_id = a.workflow_id and n.number = a.number
    where n.state || '' = 'PENDING' or (n.state || '' = 'ENQUEUED' and n.kind = 'map')
), judged as materialized (
    select
        c.workflow_id, c.number, c.kind, c.composed,
        exists (
            select from {schema}.edges e
            where e.workflow_id = c.workflow_id and e.child = c.number and e.state = 'UNMET' and not e.joins
        ) as fails,
        exists (
            select from {schema}.edges e
            where e.workflow_id = c.workflow_id and e.child = c.number and e.state = 'OPEN' and not e.joins
        ) as waits,
        c.quorum,
        case when c.quorum is not null then (
            select count(*) from (
                select from {schema}.edges e
                where e.workflow_id = c.workflow_id and e.child = c.number and e.state = 'MET' and e.joins limit c.quorum
            ) met
        ) end as met,
        case when c.quorum is not null then (
            select count(*) from (
                select from {schema}.edges e
                where e.workflow_id = c.workflow_id and e.child = c.number and e.state = 'OPEN' and e.joins limit c.quorum
            ) open
        ) end as open
    from candidate c
    where c.state <> 'ENQUEUED'
), skipped as (
    update {schema}.nodes n
    set state = 'SKIPPED', ended_at = statement_timestamp(),
        error = json_build_object('code', 'UPSTREAM_SKIPPED', 'message', 'skipped: ' || case
            when j.fails then coalesce((
                select case
                    when e.if_failed then 'it runs only if ' || p.name || ' fails, which ended ' || p.state
                    when e.expects is not null and p.state = 'COMPLETED' then 'its condition on ' || p.name || ' does not hold'
                    else 'it needs ' || p.name || ', which ended ' || p.state
                end
                from {schema}.edges e
                join {schema}.nodes p on p.workflow_id = e.workflow_id and p.number = e.parent
                where e.workflow_id = n.workflow_id and e.child = n.number and e.state = 'UNMET' and not e.joins
                order by e.parent limit 1
            ), 'a parent did not complete')
            when exists (
                select from {schema}.edges e
                where e.workflow_id = n.workflow_id and e.child = n.number and e.joins and e.if_failed
            ) then 'none of the nodes failed whose failure it handles'
            else 'no more than ' || (j.met + j.open) || ' of the ' || j.quorum || ' parents it needs can complete'
        end)
    from judged j
    where n.workflow_id = j.workflow_id and n.number = j.number and (j.fails or j.met + j.open < j.quorum)
    returning n.workflow_id, n.number
), complete as materialized (
    select c.workflow_id, c.number, c.first_member, c.members from candidate c
    where c.state = 'ENQUEUED' and not exists (
        select from {schema}.nodes m
        where m.workflow_id = c.workflow_id and m.member_of = c.number and m.state in ('PENDING', 'READY', 'ENQUEUED')
    )
), collected as (
    update {schema}.nodes n
    set state = m.came_to, ended_at = statement_timestamp(),
        error = case when m.came_to <> 'COMPLETED' then json_build_object(
            'code', 'MEMBERS_' || m.came_to, 'message', coalesce(m.name || ' ended ' || m.state, 'rows of its members are gone'),
            'data', json_build_object('member', m.name, 'task_id', m.task_id)) end
    from (
        select
            c.workflow_id, c.number, bad.name, bad.state, bad.task_id,
            case
                when bad.state = 'SKIPPED' then 'SKIPPED'
                when bad.state is not null then 'FAILED'
                when (
                    select count(*)
                    from {schema}.nodes m
                    where m.workflow_id = c.workflow_id and m.number >= c.first_member and m.number < c.first_member::bigint + c.members
                ) < c.members then 'FAILED'
                else 'COMPLETED'
            end as came_to
        from complete c
        left join lateral (
            select m.name, m.state, m.task_id
            from {schema}.nodes n
            join {schema}.nodes m on m.workflow_id = n.workflow_id and m.number >= n.first_member and m.number < n.first_member::bigint + n.members
            where n.workflow_id = c.workflow_id and n.number = c.number and m.state <> 'COMPLETED'
            order by m.state = 'SKIPPED', m.number limit 1
        ) bad on true
    ) m
    where n.workflow_id = m.workflow_id and n.number = m.number
    returning n.workflow_id, n.number, n.state
), happened as (
    insert into {schema}.outbox (workflow_id, node)
    select s.workflow_id, s.number from skipped s union all select c.workflow_id, c.number from collected c
)
select j.workflow_id, j.number, j.kind, j.composed
from judged j
where not j.fails and not j.waits and (j.quorum is null or j.met >= j.quorum)
