-- Return the id of the installation that the user's connection found, and whether the attempt still holds its task there.
select
    i.id,
    exists (select from {schema}.tasks t where t.id = %(id)s and t.claim_id = %(claim_id)s and t.state = 'RUNNING') as is_held
from {schema}.installation i
