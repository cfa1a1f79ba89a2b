"""Tiny random decoders of many architectures of transformers, and what is measured of each with meta-attention.

`make conformance` measures all of them; the tests run on those of `SOME`, which have every kind of block.
"""

import re
import tempfile
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import lru_cache
from importlib.metadata import version
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from metatokens import add_meta_attention, load_meta, save_meta, set_text_window
from metatokens.decoder import logits_at
from metatokens.errors import UserError
from metatokens.retrofit.layers import MetaModule
from metatokens.training.batches import with_logits_to_keep
from tests.checkpointing import checkpoint_activations, keep_activations
from tests.gradients import far, gradients_of, largest
from tests.numbers import decoder_roundings, rounding_bound
from tests.retrofit.small import auto_class, small

ROWS, META, LENGTH = 320, 319, 24
ROUNDINGS = decoder_roundings(torch.float32, blocks=4, width=64, length=2 * LENGTH)
ROUNDED = rounding_bound(torch.float32, ROUNDINGS, 5)  # for logits and states, which are below 5
# For attention weights and probabilities, which are below 1.
ROUNDED_WEIGHT = rounding_bound(torch.float32, ROUNDINGS)
# For gradients, as a share of the largest.
ROUNDED_GRADIENT = rounding_bound(torch.float32, 2 * ROUNDINGS)
CORPUS = [
    "the cat sat on a mat while two dogs ran over green hills and a river in spring; nobody saw how they came back"
]
# What tests ask `add_meta_attention` for.
ADDED: dict[str, Any] = {
    "meta_token_id": META,
    "heads": 2,
    "head_size": 16,
}
MOST_PARAMETERS = 40_000_000
WINDOW = 5  # tokens of a text window

_TOKENS = {"vocab_size": ROWS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
}
_PLAIN = _TOKENS | _SIZES | {"max_position_embeddings": 256}
_GROUPED = _PLAIN | {"num_key_value_heads": 2}
_SMALL_HEADS = _GROUPED | {"head_dim": 16}
_EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
_EXPERTS |= _SMALL_HEADS
_GPT = _TOKENS | {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256}
_WINDOW = {"sliding_window": 8}
_MIXED = _WINDOW | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}

# Attention, then a feed-forward layer, each after a norm.
_USUAL: dict[str, dict[str, Any]] = {
    "apertus": _GROUPED, "biogpt": _PLAIN, "ernie4_5": _GROUPED, "gemma": _SMALL_HEADS, "glm": _SMALL_HEADS,
    "gpt2": _GPT, "gpt_bigcode": _GPT, "gpt_oss": _EXPERTS | _MIXED, "granite": _GROUPED | {"residual_multiplier": 0.5},
    "helium": _SMALL_HEADS, "llama": _GROUPED, "mistral": _GROUPED | _WINDOW, "nemotron": _GROUPED, "olmo": _GROUPED,
    "modernbert-decoder": _GROUPED | _WINDOW | {"local_attention": 8}, "persimmon": _PLAIN, "qwen2": _GROUPED,
    "mixtral": _GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}, "qwen3": _GROUPED | {"head_dim": 32},
    "phi3": _GROUPED | {"original_max_position_embeddings": 256}, "qwen3_moe": _EXPERTS, "seed_oss": _SMALL_HEADS,
    "qwen2_moe": _EXPERTS | {"shared_expert_intermediate_size": 32}, "smollm3": _GROUPED, "stablelm": _GROUPED,
    "starcoder2": _GROUPED,
    "deepseek_v3": _PLAIN | {
        "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16,
        "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    },
    "gpt_neo": _TOKENS | {
        "hidden_size": 64, "num_layers": 4, "num_heads": 4, "attention_types": [[["global", "local"], 2]],
        "window_size": 8, "max_position_embeddings": 256,
    },
    "llama4_text": _SMALL_HEADS | {
        "intermediate_size_mlp": 96, "num_local_experts": 2, "num_experts_per_tok": 1, "attention_chunk_size": 64,
    },
    "mpt": _TOKENS | {"d_model": 64, "n_layers": 3, "n_heads": 4, "max_seq_len": 256},
    "opt": _TOKENS | {
        "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "ffn_dim": 96, "word_embed_proj_dim": 64,
        "max_position_embeddings": 256,
    },
    "qwen3_next": _EXPERTS | {
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "shared_expert_intermediate_size": 32,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "xglm": _TOKENS | {
        "d_model": 64, "num_layers": 3, "attention_heads": 4, "ffn_dim": 96, "max_position_embeddings": 256,
    },
}  # fmt: skip
# A norm after attention, before the residual stream.
_NORM_BEHIND: dict[str, dict[str, Any]] = {
    "exaone4": _GROUPED | _WINDOW,
    "gemma2": _SMALL_HEADS | _WINDOW,
    "gemma3_text": _SMALL_HEADS | _MIXED,
    "glm4": _SMALL_HEADS,
    "olmo2": _GROUPED,
    "olmo3": _GROUPED | _WINDOW,
}
# Attention parallel to the feed-forward layer.
_BESIDE: dict[str, dict[str, Any]] = {
    "codegen": _GPT | {"rotary_dim": 8},
    "cohere": _GROUPED,
    "cohere2": _GROUPED | _WINDOW,
    "falcon": _TOKENS | {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4},
    "gpt_neox": _PLAIN,
    "gptj": _GPT | {"rotary_dim": 8},
    "phi": _PLAIN | {"partial_rotary_factor": 0.5},
}
# The output of attention contains the residual stream.
_INSIDE: dict[str, dict[str, Any]] = {
    "bloom": _TOKENS | {"hidden_size": 64, "n_layer": 3, "n_head": 4}
}

ARCHITECTURES = dict(sorted((_USUAL | _NORM_BEHIND | _BESIDE | _INSIDE).items()))
SOME = (
    "bloom", "cohere2", "deepseek_v3", "falcon", "gemma3_text", "gpt2", "gpt_neox", "gpt_oss", "granite", "llama",
    "mistral", "mixtral", "modernbert-decoder", "olmo2", "opt", "phi", "qwen3", "qwen3_next",
)  # fmt: skip


def base(name: str, **choices: Any) -> PreTrainedModel:
    """A decoder with weights large enough for errors to show."""
    torch.manual_seed(0)
    model = auto_class(name).from_config(_config(name, choices))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.08)
    return model.eval()


def _config(name: str, choices: dict[str, Any]) -> PreTrainedConfig:
    if name not in ARCHITECTURES:
        return small(name)
    return AutoConfig.for_model(name, **ARCHITECTURES[name] | choices)


def fails_in(release: str, *values: Any, why: str) -> Any:
    """A case of a test that must fail with this release of transformers, which is itself at fault."""
    return pytest.param(
        *values,
        marks=pytest.mark.xfail(version("transformers") == release, reason=why, strict=True),
    )


def train_like(model: PreTrainedModel) -> PreTrainedModel:
    """Give meta-attention weights that have an effect, in place."""
    torch.manual_seed(3)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, MetaModule):
                module.attention.out_proj.weight.normal_(0, 0.2)
                module.attention.qkv_proj.weight.normal_(0, 0.2)
    return model


def retrofitted(
    name: str, *, freeze: bool = False, dtype: torch.dtype = torch.float32, **choices: Any
) -> PreTrainedModel:
    """The same decoder with meta-attention that has an effect, for the caller to change."""
    model = deepcopy(shared(name, freeze=freeze, dtype=dtype, **choices))
    # What a test draws next does not depend on whether the model was made before.
    torch.manual_seed(3)
    return model


@lru_cache(maxsize=32)
def shared(
    name: str, *, freeze: bool = False, dtype: torch.dtype = torch.float32, **choices: Any
) -> PreTrainedModel:
    """A `retrofitted` model made once, for tests that do not change it."""
    model = base(name, **choices)
    model = model if dtype == model.dtype else model.to(dtype)  # which also casts complex buffers
    return train_like(add_meta_attention(model, **ADDED, freeze=freeze))


def fit(model: torch.nn.Module, ids: Tensor, *, steps: int, rate: float) -> None:
    """Train what is not frozen on one batch, whose loss must fall."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def text(seed: int = 1) -> Tensor:
    """Two rows of ids without a meta-token."""
    return torch.randint(3, META, (2, LENGTH), generator=torch.Generator().manual_seed(seed))


def with_meta_tokens(seed: int = 1) -> Tensor:
    """The same rows with meta-tokens, a different number in each."""
    ids = text(seed)
    ids[0, 3::5], ids[1, 2::4] = META, META
    return ids


@torch.no_grad()
def logits(model: PreTrainedModel, ids: Tensor, **inputs: Any) -> Tensor:
    """The logits of a pass without a cache, for the entries before the meta-token."""
    return model(ids, use_cache=False, **inputs).logits[..., :META]


def error(a: Tensor, b: Tensor) -> float:
    """The largest difference."""
    return float((a.float() - b.float()).detach().abs().max())


WITHOUT_FLOAT64 = {"xglm"}  # its own mask overflows


def wrong_sites(name: str) -> float:
    """How many sites are not the attention, or the norm after it, for several precisions, weights and outliers."""
    wrong = 0
    expected = (
        r"post_(self_attn|attention)_layernorm"
        if name in _NORM_BEHIND
        else r"((self|linear)_)?att(n|ention)"
    )
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
    for dtype, make, outlier in product(dtypes, (base, _initial), (0.0, 100.0)):
        if dtype == torch.float64 and name in WITHOUT_FLOAT64:
            continue
        model = make(name).to(dtype)
        if dtype == torch.float64 and hasattr(model.config, "_experts_implementation"):
            model.set_experts_implementation("batched_mm")  # torch multiplies no groups in float64
        # Large language models have such outliers in the residual stream.
        model.get_input_embeddings().weight.data[:, 3] += outlier
        sites = add_meta_attention(model, meta_token_id=META).config.meta_attention[
            "injection_points"
        ]
        wrong += sum(re.fullmatch(expected, site) is None for site in sites)
    return float(wrong)


def _initial(name: str) -> PreTrainedModel:
    """A decoder with the weights that transformers draws."""
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **ARCHITECTURES[name]))


def text_error(name: str) -> float:
    """Logits for text: with trained meta-attention against the base."""
    return error(logits(shared(name), text()), logits(base(name), text()))


def start_error(name: str) -> float:
    """Logits for meta-tokens: with initial meta-attention against the base, given the meta-token's embedding."""
    plain, ids = base(name), with_meta_tokens()
    model = add_meta_attention(base(name), **ADDED)
    embeddings = model.get_input_embeddings()(ids)
    with torch.no_grad():
        return error(
            logits(model, ids), plain(inputs_embeds=embeddings, use_cache=False).logits[..., :META]
        )


def cached_error(name: str) -> float:
    """Logits of a sequence read in small pieces with the cache, against the same read at once."""
    model, ids = shared(name), with_meta_tokens()
    cuts = (0, 10, 11, 12, 15, 16, 17, 18, 20, LENGTH)
    past, read = None, []
    for first, last in pairwise(cuts):
        mask = torch.ones(2, last, dtype=torch.long)
        with torch.no_grad():
            out = model(
                ids[:, first:last], past_key_values=past, use_cache=True, attention_mask=mask
            )
        past, read = out.past_key_values, [*read, out.logits[..., :META]]
    return error(torch.cat(read, dim=1), logits(model, ids))


def with_padding(ids: Tensor) -> tuple[Tensor, Tensor]:
    """The ids with five tokens of padding before the first row, whose end is left out, and their mask."""
    padded, mask = ids.clone(), torch.ones_like(ids)
    padded[0, :5] = mask[0, :5] = 0
    padded[0, 5:] = ids[0, : LENGTH - 5]
    return padded, mask


def padded_error(name: str) -> float:
    """Logits of a left-padded row, against the row alone."""
    model, ids = shared(name), with_meta_tokens()
    padded, mask = with_padding(ids)
    positions = (mask.cumsum(dim=-1) - 1).clamp(min=0)
    try:
        got = logits(model, padded, attention_mask=mask, position_ids=positions)
    except TypeError:  # some derive positions from the mask
        got = logits(model, padded, attention_mask=mask)
    return error(got[0, 5:], logits(model, ids[:1, : LENGTH - 5])[0])


def reload_error(name: str, dtype: torch.dtype = torch.float32) -> float:
    """Logits of a model from disk, saved whole and as a delta, against the saved one; and for text against its base."""
    with tempfile.TemporaryDirectory() as folder:
        base(name).to(dtype).save_pretrained(Path(folder) / "base")
        load = type(base(name)).from_pretrained  # not an Auto class, which does not find all types
        plain, fresh, other = (load(Path(folder) / "base").eval() for _ in range(3))
        model = train_like(add_meta_attention(fresh, **ADDED))
        model.save_pretrained(Path(folder) / "whole")
        save_meta(model, Path(folder) / "meta")
        whole = auto_class(name).from_pretrained(Path(folder) / "whole").eval()
        put_together = load_meta(other, Path(folder) / "meta")
        assert model.dtype == whole.dtype == put_together.dtype == dtype
        expected = logits(model, with_meta_tokens())
        return largest(
            [
                error(logits(whole, with_meta_tokens()), expected),
                error(logits(put_together, with_meta_tokens()), expected),
                error(logits(model, text()), logits(plain, text())),
            ]
        )


def half_error(name: str) -> float:
    """`reload_error` in bfloat16, where what was added is in float32."""
    return reload_error(name, torch.bfloat16)


def gradient_error(name: str) -> float:
    """How far gradients with both kinds of activation checkpointing are from those without; two passes accumulate."""
    errors = []
    for freeze in (False, True):
        model = retrofitted(name, freeze=freeze).train()
        expected = _gradients(model)
        for reentrant in (False, True):
            checkpoint_activations(model, use_reentrant=reentrant)
            model.enable_input_require_grads()
            actual = _gradients(model)
            keep_activations(model)
            assert actual.keys() == expected.keys()
            errors += [far(actual[key], expected[key]) for key in expected]
    return largest(errors)


def _gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    model.zero_grad()
    torch.manual_seed(7)  # for the base's dropout
    first, second = with_meta_tokens(seed=4), with_meta_tokens(seed=5)
    second[:, 5:9] = META
    (model(first, labels=first).loss + 2 * model(second, labels=second).loss).backward()
    return gradients_of(model)


def scored_columns_error(name: str) -> float:
    """How far loss and gradients are from those with all logits when only columns with a label have logits."""
    model, ids = retrofitted(name).train(), with_meta_tokens()
    labels = ids.clone()
    labels[:, :9], labels[0, 12:], labels[1, :14] = -100, -100, -100
    in_full = {"input_ids": ids, "labels": labels}
    at_labels = with_logits_to_keep(in_full)
    losses, gradients = [], []
    for batch in (in_full, at_labels):
        model.zero_grad()
        torch.manual_seed(7)  # for the base's dropout
        out = model(**batch)
        out.loss.backward()
        losses.append(out.loss.detach())
        gradients.append(gradients_of(model))
    # The first eight, the last, and two that neither row is scored on.
    assert out.logits.shape[1] == LENGTH - 11
    expected, actual = gradients
    return largest(
        [far(*losses), *(far(actual[name], gradient) for name, gradient in expected.items())]
    )


@torch.no_grad()
def pieces_error(name: str) -> float:
    """Logits of some positions computed in pieces, against those of all positions at once."""
    model, ids = shared(name), with_meta_tokens()
    chosen = torch.rand(ids.shape, generator=torch.Generator().manual_seed(8)) < 0.5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("metatokens.decoder.PIECE", 5 * ROWS)
        pieces = list(logits_at(model, ids, chosen))
    assert {len(piece) for piece in pieces[:-1]} == {5}
    return error(torch.cat(pieces)[:, :META], logits(model, ids)[chosen])


WAYS: list[dict[str, Any]] = [
    {"do_sample": False},
    {"num_beams": 3, "do_sample": False},
    {"do_sample": True},
    {"meta_every": 3, "do_sample": False},
    {"meta_every": 2, "num_beams": 3, "do_sample": False},
]


def generation_differences(name: str, ways: Sequence[dict[str, Any]] = WAYS) -> float:
    """In how many ways of generating (greedy, beams, sampling, inserted meta-tokens) the cache changes the output."""
    model, (ids, mask) = shared(name), with_padding(with_meta_tokens())
    different = 0
    for way in ways:
        outcomes = []
        for use_cache in (True, False):
            torch.manual_seed(6)
            options = {
                "attention_mask": mask,
                "max_new_tokens": 11,
                "suppress_tokens": [2],
                "use_cache": use_cache,
            }
            outcomes.append(model.generate(ids, **options, **way))
        different += not torch.equal(*outcomes)
        assert META not in outcomes[0][:, LENGTH:]
    return float(different)


# What is measured of each architecture, and its upper limit.
CHECKS: dict[str, tuple[Callable[[str], float], float]] = {
    "sites": (wrong_sites, 0.0),
    "text": (text_error, 0.0),
    "start": (start_error, 0.0),
    "cached": (cached_error, ROUNDED),
    "padded": (padded_error, ROUNDED),
    "reloaded": (reload_error, 0.0),
    "half precision": (half_error, 0.0),
    "checkpointed gradients": (gradient_error, ROUNDED_GRADIENT),
    "scored columns": (scored_columns_error, ROUNDED_GRADIENT),
    "logits in pieces": (pieces_error, ROUNDED),
    "generation": (generation_differences, 0.0),
}


def text_window_taken(name: str) -> str:
    """What keeps all text next to a text window: heads or blocks, blocks alone, or nothing, since it is refused."""
    model = retrofitted(name)
    try:
        set_text_window(model, WINDOW, full_layers=[0])
    except UserError:
        return "refused"
    try:
        set_text_window(model, WINDOW, full_heads=[(1, 0)])
    except UserError:
        return "full blocks"
    return "full heads"


def saved_error(name: str, make: Callable[[str], PreTrainedModel]) -> float:
    """Logits of a model loaded by the Auto class, against the saved one."""
    with tempfile.TemporaryDirectory() as folder:
        model = make(name)
        model.save_pretrained(folder)
        # For some saved bases the Auto class finds no class.
        auto = auto_class(name) if make is retrofitted else type(model)
        return error(
            logits(auto.from_pretrained(folder).eval(), with_meta_tokens()),
            logits(model, with_meta_tokens()),
        )


def put_together_error(name: str) -> float:
    """Logits of a base with a loaded delta, against the model that the delta was saved from."""
    with tempfile.TemporaryDirectory() as folder:
        model = shared(name)
        save_meta(model, folder)
        return error(
            logits(load_meta(base(name), folder), with_meta_tokens()),
            logits(model, with_meta_tokens()),
        )


@torch.no_grad()
def base_cache_error(name: str) -> float:
    """Logits of a left-padded text that a base reads in steps with its cache, against the same read at once."""
    model, ids, past, read = base(name), text(), None, []
    mask = torch.ones_like(ids)
    ids[0, :5] = mask[0, :5] = 0
    for first, last in pairwise((0, *range(12, LENGTH + 1))):
        step = model.prepare_inputs_for_generation(
            ids[:, :last],
            past_key_values=past,
            attention_mask=mask[:, :last],
            next_sequence_length=last - first,
            use_cache=True,
        )
        out = model(**step)
        past, read = out.past_key_values, [*read, out.logits[:, -1:]]
    whole = model(
        **model.prepare_inputs_for_generation(ids, attention_mask=mask, use_cache=False)
    ).logits
    return error(torch.cat(read, dim=1), whole[:, 11:])


def outcome(name: str) -> tuple[str, str]:
    """The outcome for a type of decoder, `taken`, `refused`, `wrong` or `not built`, and a sentence about it.

    If a type is taken, text has the base's logits, models from disk (saved whole and as a delta) equal the saved one,
    and generation with inserted meta-tokens is the same with and without a cache. It is also taken if the base itself
    falls short of this.
    """
    try:
        if name not in ARCHITECTURES and (count := _parameters(name)) > MOST_PARAMETERS:
            return "not built", f"small, it has {count:,} parameters"
        base(name)
    except Exception as error:  # of any type
        return "not built", f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    try:
        errors = {
            "text": text_error(name),
            "put together": put_together_error(name),
            "reloaded": saved_error(name, retrofitted),
            "generation": generation_differences(name, WAYS[3:4]),
        }
    except UserError as refusal:
        return "refused", str(refusal)
    excuses = []
    if errors["generation"] and base_cache_error(name) > 1e-3:
        del errors["generation"]
        excuses.append("the base's own cache changes its logits")
    if errors["reloaded"] and saved_error(name, base):
        del errors["reloaded"]
        excuses.append("the base itself does not come back from disk")
    if any(errors.values()):
        return "wrong", str(errors)
    return "taken", ", and ".join(excuses)


def _parameters(name: str) -> int:
    """How many parameters the small model of a type has, which is not built for that."""
    with torch.device("meta"):
        empty = auto_class(name).from_config(small(name))
    return sum(parameter.numel() for parameter in empty.parameters())
