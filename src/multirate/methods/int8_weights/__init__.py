"""Plain decoding with the model's weights in 8 bits; tokens in doubt by the model's own."""
