-- Claims and completes everything, a hundred rows at a time, each half committed: as a queue does that forgets, without a client.
do $$
declare claimed uuid[];
begin
    loop
        with due as (
            select id from {schema}.bench_plain where queue = 'default' and state = 'PENDING'
            order by at, id limit 100 for no key update skip locked
        ), taken as (
            update {schema}.bench_plain t set state = 'CLAIMED', claim_id = gen_random_uuid() from due where t.id = due.id
            returning t.id
        )
        select array_agg(id) into claimed from taken;
        commit;
        exit when claimed is null;
        update {schema}.bench_plain set state = 'COMPLETED', done_at = clock_timestamp(), claim_id = null where id = any(claimed);
        commit;
    end loop;
end $$
