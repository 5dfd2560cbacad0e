"""Published methods that skip layers. One folder per method, as in methods/."""
