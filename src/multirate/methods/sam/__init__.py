"""SAM-Decoding: what followed the longest end of the text that occurred before is the draft."""
