"""GGUF files (llama.cpp's format) as transformers models: read, checked, dequantised."""
