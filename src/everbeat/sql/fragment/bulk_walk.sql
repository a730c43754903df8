-- The result of one step of a bulk action's walk over the tasks `looked`. Return the last decided id, whether the walk is over, and the
-- number of examined tasks. Return also the tasks to act on, and the matching tasks that cannot be changed, with the reason.
cut as materialized (
    select l.id from looked l where l.is_match and l.refusal is null order by l.id offset %(acted)s - 1 limit 1
), last as materialized (
    select coalesce((select c.id from cut c), (select l.id from looked l order by l.id desc limit 1)) as id
)
select
    (select l.id from last l) as position,
    not exists (select from cut) and (select count(*) from looked) < %(most)s as is_over,
    (select count(*) from looked l where l.id <= (select l.id from last l)) as examined,
    array(select l.id from looked l where l.is_match and l.refusal is null and l.id <= (select l.id from last l) order by l.id) as ids,
    array(select l.id from looked l where l.is_match and l.refusal is not null and l.id <= (select l.id from last l) order by l.id) as refused,
    array(select l.refusal from looked l where l.is_match and l.refusal is not null and l.id <= (select l.id from last l) order by l.id) as refusals
