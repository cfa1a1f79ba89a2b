"""Low-rank adapters (LoRA; Hu et al., 2022) by PEFT."""

from typing import Any

from metatokens.errors import UserError
from metatokens.retrofit.classes import MetaModel


def check_rank(model: Any, rank: int) -> None:
    """Refuse to train a model's adapters further if their rank is not the recipe's."""
    ranks = {one.r for one in model.peft_config.values()}
    if ranks != {rank}:
        raise UserError(f"the model has adapters of rank {min(ranks)}; `--lora rank={min(ranks)}` trains them further.")


def with_lora(model: Any, rank: int) -> Any:
    """Add adapters to the linear layers of a model. Only the adapters and what a retrofit added are trained.

    Args:
        model: any that `load_model` returns; its layers are wrapped in place.
        rank: of each adapter, whose output is scaled by 2 (alpha = 2 rank).

    Raises:
        UserError: if PEFT is not installed.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise UserError("training.lora_rank needs PEFT: pip install 'metatokens[lora]'.") from error
    own: dict[str, Any] = {}
    if isinstance(model, MetaModel):
        own = {"exclude_modules": ".*meta_attention.*", "modules_to_save": ["meta_token"]}
        own["modules_to_save"] += ["meta_attention"] if model.config.meta_attention["layers"] else []
    settings = LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, target_modules="all-linear", **own)
    return get_peft_model(model, settings)
