"""What a model's residuals do, layer by layer and token by token, on one page."""
