-- Return the ids of the last row of a label that a step of a search reads, and of the row after it. A step reads at most `most` rows.
select examined.id
from (
{fragment/labelled_ids}
    offset %(most)s - 1
    limit 2
) examined
order by examined.id desc
