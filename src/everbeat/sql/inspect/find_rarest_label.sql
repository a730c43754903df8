-- Return the label of a search that the fewest tasks and workflows have. Each is counted up to 1,000, in the primary key of `labels`. Rows are compared
-- as in fragment/labelled_ids.
select g.key, g.value
from jsonb_each_text(%(labels)s::text::jsonb) g
cross join lateral (
    select count(*) as rows
    from (
        select from {schema}.labels l
        where (l.key, l.value, l.id) >= (g.key, g.value, '00000000-0000-0000-0000-000000000000'::uuid)
          and (l.key, l.value, l.id) <= (g.key, g.value, 'ffffffff-ffff-ffff-ffff-ffffffffffff'::uuid)
        order by l.key, l.value, l.id
        limit 1000
    ) counted
) c
order by c.rows, g.key
limit 1
