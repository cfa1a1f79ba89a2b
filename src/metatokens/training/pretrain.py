"""Pretraining on blocks of text with meta-tokens inserted (paper, section 3 and Appendix B)."""

import math
import sys
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import (
    GPTNeoConfig,
    GPTNeoForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    default_data_collator,
    set_seed,
)

from metatokens.checkpoint import fetch_model, load_model, weights_sha256
from metatokens.data.blocks import BlockDataset, NoBlocks
from metatokens.data.store import StoreSplit, TokenStore
from metatokens.data.tokenizer import (
    load_tokenizer,
    meta_token_id,
    padded_vocab_size,
    text_vocab_size,
)
from metatokens.errors import UserError, one_line
from metatokens.machine import is_first_process
from metatokens.model.configuration import MetaGPT2Config
from metatokens.model.modeling import MetaGPT2ForCausalLM
from metatokens.model.positions import check_length
from metatokens.recipe import WITHOUT_EFFECT, ModelSettings, PretrainRecipe
from metatokens.retrofit.classes import MetaModel
from metatokens.retrofit.injection import add_meta_attention
from metatokens.training.probe import Probe, held_out_loss
from metatokens.training.run_folder import open_run
from metatokens.training.trainer import Progress, train, unwatched
from metatokens.untrusted import check_memory

HELD_OUT_BLOCKS = 64  # at most, for the held-out loss


def pretrain(
    recipe: PretrainRecipe,
    out: Path,
    *,
    init: Path | None = None,
    overwrite: bool = False,
    progress: Progress = unwatched,
) -> bool:
    """Train a language model, from random weights or from a checkpoint, until `training.max_steps`.

    Args:
        recipe: the settings; with `init`, its section `model` is not used.
        out: the run's folder: the model, `settings.json`, `curve.jsonl`, `checkpoints/`. Resumed if it holds this run.
        init: a checkpoint to start from, which may be a model of transformers.
        overwrite: replace another run in `out`.
        progress: called with the steps done, the steps in all and the latest figures.

    Returns:
        Whether anything was left to train.

    Raises:
        UserError: if the settings do not fit the data, the checkpoint or the folder.
    """
    if init is None and recipe.training.lora_rank:
        raise UserError("training.lora_rank needs a trained model: give --init.")
    store = open_store(recipe)
    set_seed(recipe.training.seed)
    model: Any
    if init is not None:
        model = load_model(init)
        recipe = recipe.model_copy(update={"model": model_settings(model.config)})
    else:
        model = _new_model(recipe, store.tokenizer)
        if isinstance(model, MetaModel):  # its base is untrained too
            training = recipe.training.model_copy(update={"train_base": True})
            recipe = recipe.model_copy(update={"training": training})
    trains_base = recipe.training.train_base or recipe.training.lora_rank
    if isinstance(model, MetaModel) and not trains_base and is_first_process():
        print(
            "only what was added to the base is trained; training.train_base=true trains all.",
            file=sys.stderr,
        )
    run = {"verb": "pretrain", "init_sha256": None if init is None else weights_sha256(init)}
    return train_on_blocks(
        model, recipe, store, out, run=run, init=init, overwrite=overwrite, progress=progress
    )


def open_store(recipe: PretrainRecipe) -> TokenStore:
    """The token store that a recipe trains on."""
    if recipe.data.tokens is None:
        raise UserError(
            "the recipe must name data.tokens, the folder that `metatokens tokenize` wrote."
        )
    return TokenStore(recipe.data.tokens)


def train_on_blocks(
    model: PreTrainedModel,
    recipe: PretrainRecipe,
    store: TokenStore,
    out: Path,
    *,
    run: dict[str, Any],
    init: Path | None,
    overwrite: bool,
    progress: Progress,
) -> bool:
    """Train a model, in place, on blocks of text until `training.max_steps`; return whether anything was left to train.

    The recipe's section `model` is only recorded. `run` is recorded too: what determines the result besides recipe and
    text. The other arguments are those of `pretrain`.

    Raises:
        UserError: as `pretrain`.
    """
    settings = recipe.training
    _check_vocabulary(model.config, store.tokenizer, recipe)
    if init is not None:
        tokenizer = load_tokenizer(str(fetch_model(init)))
        if tokenizer.get_vocab() != store.tokenizer.get_vocab():
            raise UserError(
                f"{store.path} was tokenized with another tokenizer than that of {init}: tokenize the text with "
                f"--tokenizer {init}."
            )
    check_length(model.config, recipe.data.block_size)
    run = run | {
        "recipe": recipe.model_dump(mode="json", exclude={"data": {"tokens"}, **WITHOUT_EFFECT}),
        "batch": settings.batch,
        "tokens_sha256": store.manifest.splits["train"].sha256,
    }
    blocks, probe = _blocks(recipe, store, "train"), _probe(recipe, store)
    blocks.epochs = math.ceil(settings.max_steps * settings.batch / len(blocks))
    with open_run(out, run, overwrite=overwrite, inputs=[store.path, init]) as is_finished:
        if not is_finished:
            try:
                train(
                    model,
                    blocks,
                    store.tokenizer,
                    settings,
                    out,
                    collator=default_data_collator,
                    progress=progress,
                    probe=probe,
                )
            except UserError as error:
                # From a data-loading worker, the sentence comes after the worker's traceback.
                raise UserError(
                    str(error).rpartition("metatokens.errors.UserError: ")[2].strip()
                ) from error
    return not is_finished


def _new_model(recipe: PretrainRecipe, tokenizer: PreTrainedTokenizerBase) -> Any:
    """The untrained model that a recipe asks for."""
    config = _config(recipe, tokenizer)
    if recipe.model.architecture == "gpt_neo":
        return new_gpt_neo(config, tokenizer)
    check_memory(config)
    return MetaGPT2ForCausalLM(config)


def new_gpt_neo(config: MetaGPT2Config, tokenizer: PreTrainedTokenizerBase) -> Any:
    """An untrained GPT-Neo of transformers with a meta-token (paper, section 4.1), in the sizes of a configuration.

    Biases and initialisation are GPT-Neo's, and every second layer attends only to the last 256 tokens.

    Raises:
        UserError: if the configuration has what GPT-Neo lacks: rotary positions, a second attention, or scaled
            attention; if this machine cannot hold the model.
    """
    if (config.position_embedding, config.second_attention, config.attention_scale) != (
        "learned",
        "none",
        "constant",
    ):
        raise UserError(
            "a gpt_neo has learned positions, no second attention and constant scales: set "
            "model.position_embedding=learned, model.second_attention=none and model.attention_scale=constant."
        )
    pairs, rest = divmod(config.num_hidden_layers, 2)
    base = GPTNeoConfig(
        vocab_size=text_vocab_size(tokenizer),
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        attention_types=[[["global", "local"], pairs]] + [[["global"], 1]] * rest,
        num_heads=config.num_attention_heads,
        intermediate_size=config.intermediate_size,
        max_position_embeddings=config.max_position_embeddings,
        activation_function=config.activation,
        layer_norm_epsilon=config.layer_norm_epsilon,
        initializer_range=config.initializer_range,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )
    check_memory(base)
    return add_meta_attention(GPTNeoForCausalLM(base), tokenizer, layers=[], freeze=False)


def model_settings(config: Any) -> ModelSettings:
    """The section `model` of a recipe that would make such a model; of other bases, what it can say of them."""
    fields = {
        name: getattr(config, name) for name in ModelSettings.model_fields if hasattr(config, name)
    }
    if not isinstance(config, MetaGPT2Config):
        layers = getattr(config, "meta_attention", {}).get("layers")
        fields["second_attention"] = "meta" if layers else "none"
    if isinstance(config, GPTNeoConfig):
        fields["architecture"] = "gpt_neo"
    return ModelSettings.model_construct(**fields)


def _blocks(recipe: PretrainRecipe, store: TokenStore, split: StoreSplit) -> BlockDataset:
    """The blocks that a recipe makes of a text."""
    placed = recipe.data.model_dump(include={"block_size", "fraction", "placement"})
    return BlockDataset(store, split, seed=recipe.training.seed, **placed)


def _probe(recipe: PretrainRecipe, store: TokenStore) -> Probe | None:
    """The held-out loss, on blocks that are made like those for training; None: never measured."""
    settings = recipe.training
    if settings.eval_steps == 0:
        return None
    try:
        blocks = _blocks(recipe, store, "held_out")
    except NoBlocks as error:
        if settings.eval_steps is not None:
            raise
        if is_first_process():
            print(f"No held-out loss is measured: {error}", file=sys.stderr)
        return None
    first_blocks = [blocks[index] for index in range(min(HELD_OUT_BLOCKS, len(blocks)))]
    count, size = len(first_blocks), settings.per_device_train_batch_size
    batches = [
        default_data_collator(first_blocks[start : start + size]) for start in range(0, count, size)
    ]
    return Probe(settings.measured_every(count), partial(held_out_loss, batches=batches))


def _config(recipe: PretrainRecipe, tokenizer: PreTrainedTokenizerBase) -> MetaGPT2Config:
    meta, eos = meta_token_id(tokenizer), tokenizer.eos_token_id
    try:
        return MetaGPT2Config(
            **recipe.model.model_dump(exclude={"architecture"}),
            vocab_size=padded_vocab_size(tokenizer),
            meta_token_id=meta,
            unpadded_vocab_size=max(text_vocab_size(tokenizer), meta + 1),
            bos_token_id=eos,
            eos_token_id=eos,
            pad_token_id=eos,
        )
    except StrictDataclassError as error:
        raise UserError(
            f"the recipe asks for a model that cannot be: {one_line(error.__cause__ or error)}."
        ) from error


def _check_vocabulary(
    config: MetaGPT2Config, tokenizer: PreTrainedTokenizerBase, recipe: PretrainRecipe
) -> None:
    entries, meta = text_vocab_size(tokenizer), meta_token_id(tokenizer)
    if config.vocab_size < entries:
        raise UserError(
            f"the model has {config.vocab_size} vocabulary entries and the text's tokenizer {entries}: tokenize the "
            "text with the model's own tokenizer."
        )
    if recipe.data.placement != "none" and config.meta_token_id != meta:
        raise UserError(
            f"the model's meta_token_id is {config.meta_token_id} and that of the text's tokenizer {meta}: "
            "`metatokens retrofit` gives a model a meta-token; or set data.placement=none."
        )
