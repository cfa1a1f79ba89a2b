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
    model: Any, name: str, *, trained: str = "", results: Sequence[Result] = (), licence: str | None = None
) -> ModelCard:
    """A card that describes a retrofitted model, its training and its results, for the repository `name`."""
    settings = MetaSettings(**model.config.meta_attention)
    is_folder = settings.base.startswith("../") or (Path(settings.base).is_dir() and settings.base != "")
    licence = licence or (_licence_of(settings.base) if settings.base else None)
    measured = [one for one in results if one.value is not None]
    data = ModelCardData(
        base_model=None if is_folder else settings.base or None,
        library_name="transformers",
        license=licence,
        tags=["meta-tokens", "metatokens"],
        model_name=name,
        eval_results=[_entry(one) for one in measured] or None,
    )
    return ModelCard.from_template(
        data,
        template_path=str(_TEMPLATE),
        name=name,
        base=(Path(settings.base).name if is_folder else settings.base) or f"A {type(model).__name__}",
        settings=settings,
        trained=trained,
        results=measured,
        licence=licence,
    )


def _licence_of(base: str) -> str | None:
    """The licence in a base's own card, in its folder or on the Hub."""
    readme = Path(base) / "README.md"
    try:
        return ModelCard.load(readme if readme.is_file() else base, ignore_metadata_errors=True).data.license
    except (OSError, ValueError, HfHubHTTPError):  # no card, no such repository, or no network
        return None


def _entry(one: Result) -> EvalResult:
    task = one.task or "text"
    return EvalResult(
        task_type="text-generation",
        dataset_type=task,
        dataset_name=f"{task}, {one.condition or 'own records'}, {one.length or 'any'} tokens",
        metric_type=one.metric,
        metric_value=one.value,
    )
