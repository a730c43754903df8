-- The sums of the columns of `rates`, in the order of the table. PostgreSQL has no sum of arrays, so each class is added up on its own.
sum(r.started)::bigint as started,
    sum(r.completed)::bigint as completed,
    sum(r.failed)::bigint as failed,
    sum(r.retried)::bigint as retried,
    sum(r.cancelled)::bigint as cancelled,
    sum(r.suspended)::bigint as suspended,
    sum(r.released)::bigint as released,
    sum(r.crashed)::bigint as crashed,
    sum(r.lost)::bigint as lost,
    sum(r.expired)::bigint as expired,
    sum(r.wait_s) as wait_s,
    sum(r.run_s) as run_s,
    array[
        sum(r.waits[1]), sum(r.waits[2]), sum(r.waits[3]), sum(r.waits[4]), sum(r.waits[5]), sum(r.waits[6]),
        sum(r.waits[7]), sum(r.waits[8]), sum(r.waits[9]), sum(r.waits[10]), sum(r.waits[11]), sum(r.waits[12]),
        sum(r.waits[13]), sum(r.waits[14]), sum(r.waits[15]), sum(r.waits[16]), sum(r.waits[17]), sum(r.waits[18]),
        sum(r.waits[19]), sum(r.waits[20]), sum(r.waits[21]), sum(r.waits[22]), sum(r.waits[23]), sum(r.waits[24])
    ]::bigint[] as waits,
    array[
        sum(r.runs[1]), sum(r.runs[2]), sum(r.runs[3]), sum(r.runs[4]), sum(r.runs[5]), sum(r.runs[6]),
        sum(r.runs[7]), sum(r.runs[8]), sum(r.runs[9]), sum(r.runs[10]), sum(r.runs[11]), sum(r.runs[12]),
        sum(r.runs[13]), sum(r.runs[14]), sum(r.runs[15]), sum(r.runs[16]), sum(r.runs[17]), sum(r.runs[18]),
        sum(r.runs[19]), sum(r.runs[20]), sum(r.runs[21]), sum(r.runs[22]), sum(r.runs[23]), sum(r.runs[24])
    ]::bigint[] as runs
