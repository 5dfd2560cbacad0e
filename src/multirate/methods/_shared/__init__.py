"""What the methods share: configurations, layers, the teacher, the loss."""
