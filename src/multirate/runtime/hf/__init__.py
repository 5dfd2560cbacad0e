"""A decoder that calls the layers of the transformers model itself."""
