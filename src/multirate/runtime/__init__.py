"""A Hugging Face decoder, seen structurally: embed, run layers on rows, final norm, LM head, K/V
cache.
"""
