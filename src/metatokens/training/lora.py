"""Low-rank adapters (LoRA; Hu et al., 2022) by PEFT."""

import warnings
from importlib.util import find_spec
from typing import Any

from metatokens.errors import UserError
from metatokens.retrofit.classes import MetaModel


def check_peft() -> None:
    """Refuse to go on without PEFT."""
    if find_spec("peft") is None:
        raise UserError("training.lora_rank needs PEFT: pip install peft.")


def with_lora(model: Any, rank: int) -> Any:
    """Add adapters to the linear layers of a model. Only the adapters and what a retrofit added are trained.

    Args:
        model: any that `load_model` returns; its layers are wrapped in place.
        rank: of each adapter, whose output is scaled by 2 (alpha = 2 rank).

    Raises:
        UserError: if PEFT is not installed.
    """
    check_peft()
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(
        task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, target_modules="all-linear"
    )
    if isinstance(model, MetaModel):
        has_modules = bool(model.config.meta_attention["layers"])
        settings.exclude_modules = ".*meta_attention.*"
        settings.modules_to_save = (
            ["meta_token", "meta_attention"] if has_modules else ["meta_token"]
        )
    with warnings.catch_warnings():
        # PEFT 0.21 reads a property that transformers 5.23 renamed.
        warnings.filterwarnings("ignore", message=".is_gradient_checkpointing.")
        return get_peft_model(model, settings)
