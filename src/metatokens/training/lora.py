"""Low-rank adapters (LoRA; Hu et al., 2022) by PEFT, trained in place of a model and then merged into it."""

from typing import Any

from metatokens.errors import UserError
from metatokens.retrofit.classes import MetaModel


def check_rank(model: Any, rank: int) -> None:
    """Refuse adapters of another rank than the recipe asks for, 0 being none.

    Raises:
        UserError: if a model of PEFT has such ones.
    """
    ranks = {one.r for one in model.peft_config.values()}
    if ranks != {rank}:
        raise UserError(f"the model has adapters of rank {min(ranks)}; `--lora rank={min(ranks)}` trains them further.")


def with_lora(model: Any, rank: int) -> Any:
    """A model whose linear layers have adapters, which alone are trained; of a retrofitted one also what was added.

    Args:
        model: any that `load_model` gives; its layers are wrapped in place.
        rank: of each adapter; its output is scaled by 2 (alpha = 2 rank).

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
