"""Make the cache of a pretrained model smaller: choose full heads, train, test, and report (`metatokens shrink`).

The path of the data: a user's text (texts.py) gives prose and what look-ups are about; forms.yaml and lookups.py make
look-ups of it; mixture.py has what is trained on; choosing.py, measuring.py and cost.py measure; shrinking.py does all
of it in order; page.py writes the page.
"""
