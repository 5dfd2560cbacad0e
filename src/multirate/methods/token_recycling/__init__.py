"""Token recycling: the target's runners-up after every token are the drafts of later steps."""
