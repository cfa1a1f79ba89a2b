"""The paper's four recall tasks as records of prompt and completion.

A task is a module of this folder, whose name is in `metatokens.recipe.Task`. It defines

- `draw(generator, m, n, asked, split)`, the `Content` of one example, or None if that is in another split; `copying`
  has it as a method of `Excerpts`, which hold the documents;
- `QUESTIONS`, texts for a tokenizer to be trained on;
- `CHANCE`, the exact match of a blind guess among the answers that a question allows; None where their number varies;
- `rules(condition)` and `TABLES`, what answers prompts without doing the task (see `metatokens.tasks.shortcuts`).
"""

from importlib import import_module
from types import ModuleType
from typing import get_args

from metatokens.recipe import Task

TASKS: tuple[str, ...] = get_args(Task)


def module_of(task: str) -> ModuleType:
    """The module of a task."""
    return import_module(f"metatokens.tasks.{task}")
