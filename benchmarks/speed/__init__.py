"""How fast the models, their peers and the data are, side by side in one run."""
