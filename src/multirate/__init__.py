"""M2R2 (Mixture of Multi-rate Residuals) for Hugging Face language models."""

__version__ = "0.1.0"
