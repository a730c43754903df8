-- Claim and complete all rows in batches of 100, with a commit after each claim and each completion. The result is the speed of a queue
-- without history that runs entirely inside the server.
do $$
declare claimed uuid[];
begin
    loop
        with due as (
            select id from {schema}.bench_rows where queue = 'default' and state = 'PENDING'
            order by at, id limit 100 for no key update skip locked
        ), taken as (
            update {schema}.bench_rows t set state = 'CLAIMED', claim_id = gen_random_uuid() from due where t.id = due.id
            returning t.id
        )
        select array_agg(id) into claimed from taken;
        commit;
        exit when claimed is null;
        update {schema}.bench_rows set state = 'COMPLETED', done_at = clock_timestamp(), claim_id = null where id = any(claimed);
        commit;
    end loop;
end $$
