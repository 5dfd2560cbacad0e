"""What all pages share: their look, their figures, and how they become one file."""
