"""Context extension of a model with rotary positions: YaRN, then training on longer blocks (paper, section 4.1)."""

from pathlib import Path

from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from metatokens.checkpoint import load_model, weights_sha256
from metatokens.errors import UserError
from metatokens.model.modeling import MetaGPT2ForCausalLM
from metatokens.recipe import PretrainRecipe
from metatokens.training.pretrain import model_settings, open_store, train_on_blocks
from metatokens.training.trainer import Progress, unwatched


def extend(
    model_folder: Path,
    out: Path,
    *,
    factor: float,
    recipe: PretrainRecipe,
    original_length: int | None = None,
    overwrite: bool = False,
    progress: Progress = unwatched,
) -> bool:
    """Extend a model's context by YaRN, and train it on blocks of the extended length until `training.max_steps`.

    The paper extends 1,024 tokens to 4,096 and 8,192. It gives neither the number of steps nor the text.

    Args:
        model_folder: the checkpoint to extend, with plain rotary positions.
        out: the run's folder, as in `pretrain`. Resumed if it holds this run.
        factor: the extended length divided by the original one.
        recipe: of pretraining. Its section `model` is not used, and its blocks have the extended length.
        original_length: tokens of the blocks that the model was trained on; None: its `max_position_embeddings`.
        overwrite: replace another run in `out`.
        progress: called with the steps done, the steps in all and the latest figures.

    Returns:
        Whether anything was left to train.

    Raises:
        UserError: if the model cannot be extended, or the settings do not fit the data or the folder.
    """
    store = open_store(recipe)
    model = load_model(model_folder)
    # BLOOM has none.
    original_length = original_length or int(getattr(model.config, "max_position_embeddings", 0))
    apply_yarn(model, factor, original_length)
    data = recipe.data.model_copy(update={"block_size": model.config.max_position_embeddings})
    recipe = recipe.model_copy(update={"data": data, "model": model_settings(model.config)})
    run = {
        "verb": "extend",
        "factor": factor,
        "original_length": original_length,
        "init_sha256": weights_sha256(model_folder),
    }
    return train_on_blocks(
        model,
        recipe,
        store,
        out,
        run=run,
        init=model_folder,
        overwrite=overwrite,
        progress=progress,
    )


def apply_yarn(model: PreTrainedModel, factor: float, original_length: int) -> None:
    """Give both attentions of a model the rotary tables of YaRN (Peng et al., 2023), in place; its weights stay.

    A frequency that turns more than `beta_fast` times within the original length stays the same. One that turns less
    than `beta_slow` times is divided by the factor. There is a linear ramp between the two. Cosines and sines are
    multiplied by 0.1 ln(factor) + 1. None of this depends on the length of a sequence. The parameters are those of the
    paper's Appendix C.

    Raises:
        UserError: if the model is not of this family, its positions are not rotary or are scaled already, or the factor
            is at most 1 or makes a length that is not whole.
    """
    config = model.config
    if config.position_embedding != "rope":
        raise UserError(
            f"the model has position_embedding {config.position_embedding!r}; YaRN extends rotary positions, 'rope'."
        )
    if not isinstance(model, MetaGPT2ForCausalLM):
        raise UserError(
            f"extend is for this package's own models; this is a {type(model).__name__}. Extend its context in "
            "transformers (rope_parameters) before `metatokens retrofit`."
        )
    if config.rope_parameters["rope_type"] != "default":
        raise UserError(
            f"the model's rotary positions are scaled already (rope_type {config.rope_parameters['rope_type']!r}); "
            "extend the model that it came from, by the whole factor."
        )
    length = factor * original_length
    if not length > original_length or not float(length).is_integer():
        raise UserError(
            f"factor {factor:g} extends {original_length} tokens to {length:g}; it must be above 1, and the "
            "result whole."
        )
    config.max_position_embeddings = int(length)
    config.rope_parameters = {
        "rope_type": "yarn",
        "rope_theta": config.rope_parameters["rope_theta"],
        "factor": factor,
        "original_max_position_embeddings": original_length,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "attention_factor": None,  # a number would replace 0.1 ln(factor) + 1, not multiply it as the paper's 1.0 does
    }
    model.model.rotary_emb = LlamaRotaryEmbedding(config).to(model.device)
