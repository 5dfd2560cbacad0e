"""The same on a GPU, recorded and replayed as CUDA graphs."""
