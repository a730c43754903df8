-- Sees the database as it is now for as long as this transaction lasts; nothing that changes meanwhile can be cleaned up.
select txid_current_snapshot()
