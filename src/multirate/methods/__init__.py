"""One folder per method, each registered by its `spec.py` (see methods/spec.py)."""
