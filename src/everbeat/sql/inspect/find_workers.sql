-- List workers and supervisors whose id equals or begins with a text. The best matches come first (1: equal, 2: up to a hyphen, 3: any
-- prefix), and live processes come before ended ones.
select x.rank, x.kind, x.id, x.ended
from (
    select
        case when w.id = %(text)s then 1 when starts_with(w.id, %(text)s || '-') then 2 else 3 end as rank,
        'worker' as kind, w.id, w.ended_at is not null or s.ended_at is not null as ended, w.started_at
    from {schema}.workers w
    join {schema}.supervisors s on s.id = w.supervisor_id
    where starts_with(w.id, %(text)s)
    union all
    select
        case when s.id = %(text)s then 1 when starts_with(s.id, %(text)s || '-') then 2 else 3 end,
        'supervisor', s.id, s.ended_at is not null, s.started_at
    from {schema}.supervisors s
    where starts_with(s.id, %(text)s)
) x
where %(supervisors)s or x.kind = 'worker'
order by x.rank, x.ended, x.started_at desc, x.id
limit %(limit)s
