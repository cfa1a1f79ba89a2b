"""`metatokens shrink`: its look-ups, its training, its measures and the whole command, on a small Llama."""
