"""Speculative decoding: drafts, verification, acceptance, and how much to draft."""
