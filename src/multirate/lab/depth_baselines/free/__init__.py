"""FREE: one shallow exit; the deeper layers of tokens that left run with the next deep one."""
