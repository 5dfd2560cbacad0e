"""Prompts of the public suites, interleaved measuring, and the table and JSON that come of it."""
