"""LITE: exits trained through the shared head, each with a threshold of its own."""
