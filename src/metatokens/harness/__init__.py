"""lm-evaluation-harness: a kind of model for its `--model`, and tasks for its `--tasks`."""
