"""Pretraining on blocks of text with meta-tokens inserted (paper, section 3 and Appendix B)."""

import math
from pathlib import Path

import torch
from transformers import default_data_collator, set_seed

from metatokens.data.blocks import BlockDataset, TokenStore
from metatokens.data.tokenizer import meta_token_id, padded_vocab_size
from metatokens.errors import UserError
from metatokens.model.checkpoint import load_model
from metatokens.model.configuration import MetaGPT2Config
from metatokens.model.modeling import MetaGPT2ForCausalLM
from metatokens.recipe import PretrainRecipe
from metatokens.training.trainer import Progress, open_run, train


def pretrain(
    recipe: PretrainRecipe,
    out: Path,
    *,
    init: Path | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> None:
    """Train a language model, or go on with one, until `training.max_steps`.

    Args:
        recipe: the settings; with `init`, the section `model` is not used.
        out: the run's folder: the model, `settings.json`, `curve.jsonl`, `checkpoints/`. Resumed if it holds this run.
        init: a checkpoint to start from, a GPT-2 of transformers included.
        overwrite: replace another run in `out`.
        progress: called with the steps done and the steps in all.

    Raises:
        UserError: if the settings do not fit the data, the checkpoint or the folder.
    """
    if recipe.data.tokens is None:
        raise UserError("the recipe names no data.tokens: the folder that `metatokens tokenize` wrote.")
    store = TokenStore.open(recipe.data.tokens)
    settings = recipe.training
    batch = settings.per_device_train_batch_size * settings.gradient_accumulation_steps
    blocks = _blocks(recipe, store, epochs=1)
    needed = settings.max_steps * batch * int(_world_size())
    dataset = _blocks(recipe, store, epochs=math.ceil(needed / len(blocks)))
    run = {"verb": "pretrain", "recipe": recipe.model_dump(mode="json"), "init": init and str(init)}
    run["train_sha256"] = store.manifest.splits["train"].sha256
    if open_run(out, run, overwrite=overwrite):
        return
    set_seed(settings.seed)
    model = _new_model(recipe, store) if init is None else load_model(init, recipe.model.second_attention)
    longest = recipe.data.block_size
    if model.config.position_embedding == "learned" and longest > model.config.max_position_embeddings:
        raise UserError(
            f"data.block_size {longest} is beyond the {model.config.max_position_embeddings} learned positions."
        )
    if init is not None:
        _check_vocabulary(model, store, recipe)
    train(model, dataset, store.tokenizer, settings, out, collator=default_data_collator, progress=progress)


def _world_size() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


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


def _new_model(recipe: PretrainRecipe, store: TokenStore) -> MetaGPT2ForCausalLM:
    eos = store.tokenizer.eos_token_id
    config = MetaGPT2Config(
        **recipe.model.model_dump(),
        vocab_size=padded_vocab_size(store.tokenizer),
        meta_token_id=meta_token_id(store.tokenizer),
        bos_token_id=eos,
        eos_token_id=eos,
        pad_token_id=eos,
    )
    return MetaGPT2ForCausalLM(config)


def _check_vocabulary(model: MetaGPT2ForCausalLM, store: TokenStore, recipe: PretrainRecipe) -> None:
    if model.config.vocab_size < len(store.tokenizer):
        raise UserError(
            f"the model has {model.config.vocab_size} vocabulary entries and the token store {len(store.tokenizer)}: "
            "they were made with different tokenizers."
        )
    if recipe.data.placement != "none" and model.config.meta_token_id != meta_token_id(store.tokenizer):
        raise UserError(
            f"the model's meta_token_id is {model.config.meta_token_id} and the token store's is "
            f"{meta_token_id(store.tokenizer)}; convert the model with a second attention, or set data.placement=none."
        )
