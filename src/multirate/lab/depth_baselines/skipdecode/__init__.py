"""SkipDecode: one depth per position for the whole batch, which never rises."""
