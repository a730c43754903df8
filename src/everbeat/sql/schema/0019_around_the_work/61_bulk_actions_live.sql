-- A second identical request joins the first one while it has not ended. The index also finds the actions that are to be carried out.
create unique index {concurrently} bulk_actions_live on {schema}.bulk_actions (digest) where ended_at is null
