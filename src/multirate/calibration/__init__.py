"""Dynamic mode's thresholds for a promised quality: Learn-then-Test on held-out prompts."""
