"""``quartet doctor``: what of this host or container would break a run, why that matters, and what to change."""
