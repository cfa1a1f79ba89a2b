"""One prompt, one model: a page and a figure of what the model attends to and answers."""
