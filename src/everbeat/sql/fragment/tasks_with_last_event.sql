-- Each task `t`, also those in `history`, with the time of its last event, `event.at`.
{schema}.all_tasks t
{fragment/last_event}
