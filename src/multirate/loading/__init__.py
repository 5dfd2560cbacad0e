"""Every way a model comes in: folders, the hub, GGUF files, names."""
