-- Hold a snapshot until this transaction ends, so that VACUUM cannot remove rows that die in the meantime.
select txid_current_snapshot()
