"""The accelerated residual as a predictor of experts (M2R2's third use)."""
