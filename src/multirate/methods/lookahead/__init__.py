"""Lookahead decoding: Jacobi iterations beside the text collect n-grams, which are the drafts."""
