"""Pretraining on blocks of text with meta-tokens inserted (paper, section 3 and Appendix B)."""

import math
from pathlib import Path
from typing import Any

from transformers import default_data_collator, set_seed

from metatokens.data.blocks import BlockDataset, TokenStore
from metatokens.data.tokenizer import padded_vocab_size
from metatokens.errors import UserError
from metatokens.model.checkpoint import LanguageModel, load_model, weights_sha256
from metatokens.model.configuration import MetaGPT2Config, check_memory
from metatokens.model.gpt_neo import GPTNeoForCausalLM
from metatokens.model.modeling import MetaGPT2ForCausalLM
from metatokens.model.positions import check_length
from metatokens.recipe import WITHOUT_EFFECT, PretrainRecipe
from metatokens.training.run_folder import open_run
from metatokens.training.trainer import Progress, check_trackers, train, unwatched


def pretrain(
    recipe: PretrainRecipe,
    out: Path,
    *,
    init: Path | None = None,
    overwrite: bool = False,
    progress: Progress = unwatched,
) -> None:
    """Train a language model, or go on with one, until `training.max_steps`.

    Args:
        recipe: the settings; with `init`, the section `model` is not used.
        out: the run's folder: the model, `settings.json`, `curve.jsonl`, `checkpoints/`. Resumed if it holds this run.
        init: a checkpoint to start from, a GPT-2 or GPT-Neo of transformers included.
        overwrite: replace another run in `out`.
        progress: called with the steps done and the steps in all.

    Raises:
        UserError: if the settings do not fit the data, the checkpoint or the folder.
    """
    store = open_store(recipe)
    set_seed(recipe.training.seed)
    if init is None:
        config = _config(recipe, store)
        is_gpt_neo = recipe.model.architecture == "gpt_neo"
        check_memory(config, has_masks=is_gpt_neo)
        model = GPTNeoForCausalLM.like(config) if is_gpt_neo else MetaGPT2ForCausalLM(config)
    else:
        model = load_model(init, recipe.model.second_attention)
    run = {"verb": "pretrain", "init_sha256": None if init is None else weights_sha256(init)}
    train_on_blocks(model, recipe, store, out, run=run, overwrite=overwrite, progress=progress)


def open_store(recipe: PretrainRecipe) -> TokenStore:
    """The token store that a recipe names.

    Raises:
        UserError: if it names none, or there is no complete one.
    """
    if recipe.data.tokens is None:
        raise UserError("the recipe names no data.tokens: the folder that `metatokens tokenize` wrote.")
    return TokenStore.open(recipe.data.tokens)


def train_on_blocks(
    model: LanguageModel,
    recipe: PretrainRecipe,
    store: TokenStore,
    out: Path,
    *,
    run: dict[str, Any],
    overwrite: bool,
    progress: Progress,
) -> None:
    """Train a model on a token store's blocks until `training.max_steps`, or find that the run is finished.

    Args:
        model: changed in place.
        recipe: the settings; the section `model` is not used.
        store: what `open_store` gave.
        out, overwrite, progress: as in `pretrain`.
        run: what determines the run's result beside recipe and text; recorded with them.

    Raises:
        UserError: if the settings do not fit the data, the model or the folder.
    """
    settings = recipe.training
    check_trackers(settings)
    _check_vocabulary(model.config, store, recipe)
    check_length(model.config, recipe.data.block_size)
    epochs = math.ceil(settings.max_steps * settings.batch / len(_blocks(recipe, store, epochs=1)))
    run = run | {
        "recipe": recipe.model_dump(mode="json", exclude={"data": {"tokens"}, **WITHOUT_EFFECT}),
        "batch": settings.batch,
        "tokens_sha256": store.manifest.splits["train"].sha256,
    }
    with open_run(out, run, overwrite=overwrite) as is_finished:
        if not is_finished:
            dataset = _blocks(recipe, store, epochs=epochs)
            try:
                train(model, dataset, store.tokenizer, settings, out, collator=default_data_collator, progress=progress)
            except UserError as error:
                # A data-loading worker's comes with the worker's traceback before the sentence.
                raise UserError(str(error).rpartition("metatokens.errors.UserError: ")[2].strip()) from error


def _blocks(recipe: PretrainRecipe, store: TokenStore, *, epochs: int) -> BlockDataset:
    data = recipe.data
    return BlockDataset(
        store,
        "train",
        block_size=data.block_size,
        fraction=data.fraction,
        placement=data.placement,
        seed=recipe.training.seed,
        epochs=epochs,
    )


def _config(recipe: PretrainRecipe, store: TokenStore) -> MetaGPT2Config:
    eos = store.manifest.eos_token_id
    return MetaGPT2Config(
        **recipe.model.model_dump(exclude={"architecture"}),
        vocab_size=padded_vocab_size(store.tokenizer),
        meta_token_id=store.manifest.meta_token_id,
        bos_token_id=eos,
        eos_token_id=eos,
        pad_token_id=eos,
    )


def _check_vocabulary(config: MetaGPT2Config, store: TokenStore, recipe: PretrainRecipe) -> None:
    entries, meta = store.manifest.vocab_size, store.manifest.meta_token_id
    if config.vocab_size < entries:
        raise UserError(
            f"the model has {config.vocab_size} vocabulary entries and the token store {entries}: they were made with "
            "different tokenizers."
        )
    if recipe.data.placement != "none" and config.meta_token_id != meta:
        raise UserError(
            f"the model's meta_token_id is {config.meta_token_id} and the token store's is {meta}; convert the model "
            "with a second attention, or set data.placement=none."
        )
