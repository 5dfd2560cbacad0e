"""Prompt lookup: the continuation of an earlier occurrence of the last n tokens is the draft."""
