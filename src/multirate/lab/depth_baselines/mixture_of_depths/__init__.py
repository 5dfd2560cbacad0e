"""Mixture-of-Depths: at every other block a router decides which tokens pass it by."""
