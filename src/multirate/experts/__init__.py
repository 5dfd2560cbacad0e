"""Mixture-of-experts models larger than memory: experts on disk, a bounded cache, loads ahead of
time.
"""
