"""Accuracy and perplexity of a model, with intervals, and its use in lm-evaluation-harness."""
