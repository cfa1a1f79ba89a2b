"""Accuracy and perplexity of a model, with intervals."""
