"""The model card of a retrofitted model: what it is, how it was trained, what was measured, its base's licence."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import HfHubHTTPError

from metatokens.records import Result
from metatokens.retrofit.settings import MetaSettings

_BODY = """
# {name}

{base} with meta-tokens ([metatokens](https://pypi.org/project/metatokens)): learned tokens that are put into a text as
landmarks.{attention} Unless its base was trained too, its logits for text without meta-tokens are the base's.

## Use

```python
import metatokens
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
print(tokenizer.decode(model.generate(**tokenizer("Text", return_tensors="pt"), meta_every=8)[0]))
```

## Training

{trained}

## Results

{results}

## Licence

{licence}
"""


def model_card(
    model: Any, name: str, *, trained: str = "", results: Sequence[Result] = (), licence: str | None = None
) -> ModelCard:
    """A card for the Hugging Face Hub.

    Args:
        model: a retrofitted model.
        name: of its repository.
        trained: how it was trained, in words.
        results: what was measured of it.
        licence: as the Hub abbreviates it; by default that of the base's own card, where it can be read.
    """
    settings = MetaSettings(**model.config.meta_attention)
    is_folder = settings.base.startswith("../") or (Path(settings.base).is_dir() and settings.base != "")
    base = (Path(settings.base).name if is_folder else settings.base) or f"A {type(model).__name__}"
    licence = licence or (licence_of(settings.base) if settings.base else None)
    heads = f"{settings.num_attention_heads} heads of {settings.head_size}"
    attention = f" In {len(settings.layers)} blocks they attend to one another by {heads}." if settings.layers else ""
    measured = [one for one in results if one.value is not None]
    data = ModelCardData(
        base_model=None if is_folder else settings.base or None,
        library_name="transformers",
        license=licence,
        tags=["meta-tokens", "metatokens"],
        model_name=name,
        eval_results=[_entry(one) for one in measured] or None,
    )
    text = _BODY.format(
        name=name,
        base=base,
        attention=attention,
        trained=trained or "It was not trained since meta-tokens were added.",
        results=_table(measured) or "Nothing was measured.",
        licence=f"That of the base: {licence}." if licence else f"That of the base, {base}; it was not found here.",
    )
    return ModelCard(f"---\n{data.to_yaml()}\n---\n{text}")


def licence_of(base: str) -> str | None:
    """The licence in a base's own card, beside it or on the Hub."""
    beside = Path(base) / "README.md"
    try:
        return ModelCard.load(beside if beside.is_file() else base, ignore_metadata_errors=True).data.license
    except (OSError, ValueError, HfHubHTTPError):  # no card, no such place, or no network
        return None


def _entry(one: Result) -> EvalResult:
    task = one.task or "text"
    named = f"{task}, {one.condition or 'own records'}, {one.length or 'any'} tokens"
    return EvalResult(
        task_type="text-generation",
        dataset_type=task,
        dataset_name=named,
        metric_type=one.metric,
        metric_value=one.value,
    )


def _table(results: Sequence[Result]) -> str:
    if not results:
        return ""
    heading = ("task", "prompts", "tokens", "measure", "value", "95 % interval", "n", "seed")
    rows = [heading, ("---",) * len(heading)]
    for one in results:
        interval = "" if one.low is None or one.high is None else f"{one.low:.3g} to {one.high:.3g}"
        about = (one.task or "text", one.condition or "", str(one.length or ""), one.metric.replace("_", " "))
        rows.append((*about, f"{one.value:.3g}", interval, str(one.n), str(one.seed)))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
