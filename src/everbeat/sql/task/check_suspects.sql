-- Return whether any suspect that the worker can take is due.
select {fragment/is_suspect_due}
