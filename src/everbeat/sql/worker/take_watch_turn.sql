-- Take or renew one of the `turns` turns to watch for the observers of one kind. Return no turn if other supervisors have all of them.
-- `supervisors`: how many supervisors have not ended, at most 101. `is_mass`: a watcher has found a mass silence or a mass loss of sessions.
-- A turn is free if its holder has not renewed it in time. A holder also has its own session lock, which PostgreSQL releases when the
-- holder's session ends. Such a turn is returned in `suspects`. A caller that finds it there twice takes it, because a live holder
-- reconnects in between. `is_locked` is false while an earlier session of the caller still holds its lock. The lock of another holder is
-- tried in shared mode and only for this statement. `by_lock` is false behind a transaction pooler. Roles differ in what
-- they see of other sessions, so the roles are a part of the kind. Losing a turn in a server crash does no harm, so the statement does not
-- wait for the disk. The turns of kinds without supervisors are deleted after a day.
with relaxed as materialized (
    select set_config('synchronous_commit', 'off', true)
), kind as materialized (
    select 'watch:' || md5(concat_ws(' ', %(kind)s::text, session_user, current_user)) as name
), turn as materialized (
    select k.name || ':' || n.place as service, n.place, t.taken_by,
        coalesce(
            t.taken_by = %(taken_by)s or t.taken_until <= statement_timestamp() or t.taken_at > clock_timestamp()
                or t.taken_until > statement_timestamp() + interval '1 day', true
        ) as is_free
    from kind k
    cross join generate_series(0, %(turns)s - 1) n (place)
    left join {schema}.turns t on t.service = k.name || ':' || n.place
), unlocked as materialized (
    select t.service, t.service || ' ' || t.taken_by as suspect
    from turn t
    where case
        when t.is_free or not %(by_lock)s then false
        else pg_try_advisory_xact_lock_shared(hashtextextended('everbeat watch {schema} ' || t.taken_by, 0))
    end
), free as materialized (
    select t.service, t.taken_by
    from turn t
    where t.is_free or t.service in (select u.service from unlocked u where u.suspect = any(%(suspects)s::text[]))
    order by t.taken_by is not distinct from %(taken_by)s desc, t.place
    limit 1
), locked as materialized (
    select case when %(by_lock)s then pg_try_advisory_lock(hashtextextended('everbeat watch {schema} ' || %(taken_by)s, 0)) else true end as ok
    from free f
), taken as (
    insert into {schema}.turns as t (service, taken_at, taken_until, taken_by)
    select f.service, statement_timestamp(), statement_timestamp() + %(turn_ms)s * interval '1 millisecond', %(taken_by)s
    from free f
    cross join relaxed
    cross join locked l
    where l.ok or f.taken_by = %(taken_by)s
    on conflict (service) do update
    set taken_at = excluded.taken_at, taken_until = excluded.taken_until, taken_by = excluded.taken_by
    where t.taken_by = (select f.taken_by from free f)
    returning t.service
), forgotten as (
    delete from {schema}.turns t
    where starts_with(t.service, 'watch:') and t.taken_until < statement_timestamp() - interval '1 day' and exists (select from taken)
), mass as (
    insert into {schema}.turns as t (service, taken_at, taken_until, taken_by)
    select 'mass', statement_timestamp(), statement_timestamp() + %(mass_ms)s * interval '1 millisecond', %(taken_by)s
    from relaxed
    where %(mass_ms)s > 0
    on conflict (service) do update
    set taken_at = excluded.taken_at, taken_until = excluded.taken_until, taken_by = excluded.taken_by
)
select
    (select t.service from taken t) as turn,
    coalesce((select l.ok from locked l), true) as is_locked,
    array(select u.suspect from unlocked u) as suspects,
    (select count(*) from (select from {schema}.supervisors s where s.ended_at is null limit 101) few) as supervisors,
    exists (
        select from {schema}.turns t
        where t.service = 'mass' and t.taken_until > statement_timestamp() and t.taken_at <= clock_timestamp()
    ) as is_mass
