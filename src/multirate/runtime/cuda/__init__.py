"""The same on a GPU, captured and replayed as CUDA graphs."""
