"""Which runs answer which question, and how they are carried out."""
