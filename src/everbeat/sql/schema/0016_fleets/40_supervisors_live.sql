-- The supervisors that have not ended, for those that watch them. The table keeps ended ones for a week.
create index {concurrently} supervisors_live on {schema}.supervisors (id) where ended_at is null
