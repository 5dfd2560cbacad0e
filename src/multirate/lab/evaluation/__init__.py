"""Quality on tasks: lm-evaluation-harness asks the engine, and its answers are scored."""
