"""From documents to blocks of token ids with meta-tokens inserted, prompts, and rules for landmarks."""
