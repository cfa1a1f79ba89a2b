"""Meta-tokens and meta-attention in any decoder of transformers, whose text logits stay what they are."""
