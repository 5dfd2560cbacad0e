"""What methods with exits share."""
