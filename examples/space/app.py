"""A Hugging Face Space: prompts with meta-tokens, answered by the model that comes with metatokens."""

from pathlib import Path

from metatokens.looking.explore import build, settings

page = build([Path("example")])

if __name__ == "__main__":
    page.launch(**settings())
