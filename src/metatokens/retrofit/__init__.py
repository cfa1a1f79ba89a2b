"""Meta-tokens and meta-attention in most decoders of transformers; a frozen base keeps its text logits."""
