"""Accuracy, perplexity, and the records that hold them."""
