"""Compare everything that users see of everbeat with `records`, so that no change of it is accidental."""
