"""Two models: any other model with the same tokenizer drafts."""
