"""DEED: deeply supervised exits with an adapter each; deeper features just in time."""
