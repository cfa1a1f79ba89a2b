"""The paper's four recall tasks as records of prompt and completion."""

from typing import get_args

from metatokens.recipe import Task

TASKS: tuple[str, ...] = get_args(Task)
