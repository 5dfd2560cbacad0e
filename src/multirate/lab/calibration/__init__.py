"""Thresholds of dynamic mode for a quality target: Learn-then-Test on held-out prompts."""
