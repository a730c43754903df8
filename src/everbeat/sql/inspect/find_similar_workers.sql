-- Return the ids of workers and supervisors that begin with one of the given texts, followed by a hyphen.
select x.id
from (select w.id from {schema}.workers w union all select s.id from {schema}.supervisors s) x
where exists (select from unnest(%(stems)s::text[]) as stem (text) where starts_with(x.id, stem.text || '-'))
