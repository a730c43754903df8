-- Take the turn of a cluster service for one interval. Return no row if another tree has the turn.
{fragment/turn}
