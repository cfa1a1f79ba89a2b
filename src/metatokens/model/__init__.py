"""The GPT-2 family with meta-tokens: configuration, layers, cache, generation."""
