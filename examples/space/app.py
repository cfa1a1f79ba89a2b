"""A Hugging Face Space: prompts with meta-tokens, answered by the model that comes with metatokens."""

from metatokens.looking.explore import build, theme
from metatokens.model.checkpoint import EXAMPLE

page = build([EXAMPLE])

if __name__ == "__main__":
    page.launch(theme=theme())
