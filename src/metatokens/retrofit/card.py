"""The model card of a retrofitted model, for the Hugging Face Hub."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import HfHubHTTPError

from metatokens.records import Result
from metatokens.retrofit.settings import MetaSettings

_TEMPLATE = Path(__file__).parent / "card.md.j2"


def model_card(
    model: Any,
    name: str,
    *,
    trained: str = "",
    results: Sequence[Result] = (),
    licence: str | None = None,
) -> ModelCard:
    """A card that describes a retrofitted model, its training and its results, for the repository `name`."""
    settings = MetaSettings(**model.config.meta_attention)
    base = settings.base
    is_on_hub = base != "" and not base.startswith("../") and not Path(base).is_dir()
    name_of_base = base if is_on_hub else Path(base).name
    if licence is None and base:
        licence = _licence_of(base)
    measured = [result for result in results if result.value is not None]
    data = ModelCardData(
        base_model=base if is_on_hub else None,
        library_name="transformers",
        license=licence,
        tags=["meta-tokens", "metatokens"],
        model_name=name,
        eval_results=[_entry(result) for result in measured] or None,
    )
    return ModelCard.from_template(
        data,
        template_path=str(_TEMPLATE),
        name=name,
        base=name_of_base or f"A {type(model).__name__}",
        settings=settings,
        trained=trained,
        results=measured,
        licence=licence,
    )


def _licence_of(base: str) -> str | None:
    """The licence in a base's own card, in its folder or on the Hub."""
    readme = Path(base) / "README.md"
    try:
        return ModelCard.load(
            readme if readme.is_file() else base, ignore_metadata_errors=True
        ).data.license
    except (OSError, ValueError, HfHubHTTPError):  # no card, no such repository, or no network
        return None


def _entry(result: Result) -> EvalResult:
    task = result.task or "text"
    return EvalResult(
        task_type="text-generation",
        dataset_type=task,
        dataset_name=f"{task}, {result.condition or 'own records'}, {result.length or 'any'} tokens",
        metric_type=result.metric,
        metric_value=result.value,
    )
