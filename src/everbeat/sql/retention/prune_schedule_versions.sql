-- Delete a batch of old versions of declared schedules that no stored worker declares. Return the position at which the next step
-- begins, or null at the end.
with old as materialized (
    select v.owner, v.version from {schema}.schedule_versions v
    where v.owner >= %(after)s and v.live_since < statement_timestamp() - %(hours)s * interval '1 hour'
      and not exists (select from {schema}.workers w where w.schedule_owner = v.owner and w.schedule_version = v.version)
    order by v.owner, v.version
    limit %(limit)s
    for update skip locked
), gone as (
    delete from {schema}.schedule_versions v using old o where v.owner = o.owner and v.version = o.version returning 1
)
select (select max(owner) from old having count(*) = %(limit)s) as next_after, (select count(*) from gone) as schedule_versions
