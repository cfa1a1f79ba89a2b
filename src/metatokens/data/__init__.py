"""From a corpus of documents to blocks of token ids with meta-tokens inserted."""
