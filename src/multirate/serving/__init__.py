"""`multirate serve`: one model behind an HTTP API that OpenAI's clients speak."""
