"""EAGLE-3: a decoder layer that drafts from residuals of three depths, with its own head."""
