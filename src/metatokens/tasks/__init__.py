"""The paper's four recall tasks as records of prompt and completion."""

TASKS = ("list_recall", "segment_counting", "parity", "copying")  # each a module of this folder
