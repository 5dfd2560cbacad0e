"""Transformers models, and other GGUF files, written as GGUF files that llama.cpp reads."""
