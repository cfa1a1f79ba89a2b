"""Programs on top of metatokens."""
