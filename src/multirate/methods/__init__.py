"""One folder per method; `registry` maps names to them."""
