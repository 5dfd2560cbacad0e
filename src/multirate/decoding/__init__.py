"""The decoding loops and what they share: sampling, acceptance, stopping, draft length, costs."""
