"""Plain decoding: the baseline."""
