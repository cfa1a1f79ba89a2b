"""The benchmarks: the models that take part, their unit of work, and the arithmetic that it needs."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import StaticCache

from benchmarks.speed.cost import Product, decode_bytes, flops, forward_products
from benchmarks.speed.peers import PEERS, SHAPES, Peer, ShapeName
from metatokens.data.insertion import IGNORED_LABEL, insert_meta_tokens, meta_token_count
from metatokens.errors import UserError
from metatokens.model.configuration import MetaGPT2Config
from metatokens.model.linear import FEW_ROWS, linear
from metatokens.model.modeling import MetaGPT2ForCausalLM
from metatokens.paper.records import Benchmark
from metatokens.recipe import Device, Dtype
from metatokens.training.batches import with_positions

FRACTION = 0.1  # share of meta-tokens in a sequence (the paper's k)
META_EVERY = 10  # generated text tokens per inserted meta-token
ANSWER_TOKENS = 4  # labels per row in `answers`
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The settings that all contestants of a run share.

    Attributes:
        shape: the models' sizes.
        length: positions of a training block, of a prompt, or of the context that decoding starts from.
        batch: sequences per batch.
        new_tokens: text tokens that decoding adds to each sequence.
        rounds, warmup: timed rounds, and untimed rounds before them.
        threads: PyTorch threads on the CPU.
        dtype: the type of the weights; in training, of autocast over float32 weights.
        device: where the models run.
        compiled: whether the models go through `torch.compile`.

    Raises:
        UserError: if there is no GPU, or a number is too small.
    """

    shape: ShapeName = "small"
    length: int = 1024
    batch: int = 1
    new_tokens: int = 6 * META_EVERY + 1
    rounds: int = 10
    warmup: int = 2
    threads: int = field(default_factory=torch.get_num_threads)
    dtype: Dtype = "float32"
    device: Device = "cpu"
    compiled: bool = False

    def __post_init__(self) -> None:
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UserError("there is no GPU that PyTorch can use.")
        if (
            self.length < 16
            or min(self.batch, self.new_tokens, self.rounds, self.warmup, self.threads) < 1
        ):
            raise UserError(
                "a benchmark needs a length of at least 16, and at least 1 of everything else."
            )


@dataclass(frozen=True)
class Entry:
    """A contestant.

    Attributes:
        name: the name in its figures.
        peer: its model, in `peers.PEERS`.
        against: contestants that it is compared with; by default the first of its heat.
        inserts: whether meta-tokens are inserted while decoding.
        full_logits: whether a fine-tuning step computes the logits of all positions.
        static: whether it decodes with a static cache.
        compiled: whether it goes through `torch.compile` whatever the setting.
    """

    name: str
    peer: str
    against: tuple[str, ...] = ()
    inserts: bool = False
    full_logits: bool = False
    static: bool = False
    compiled: bool = False


def _entry(peer: str, *against: str) -> Entry:
    return Entry(peer, peer, against)


def _with_compiled(peer: str, *against: str) -> tuple[Entry, Entry]:
    return _entry(peer, *against), Entry(f"{peer}, compiled", peer, (peer,), compiled=True)


_THEIRS = (_entry("transformers"), _entry("gpt2-learned"))

# The contestants of a heat take turns; the first is the baseline. Only one heat's models are in memory at a time.
HEATS: dict[Benchmark, tuple[tuple[Entry, ...], ...]] = {
    "train": (
        # Two models on the same blocks, with nothing else in memory: the fuller the memory, the longer the kernel takes
        # to hand out pages, and the more so for a model that asks for more.
        (_entry("pause"), _entry("meta")),
        (
            _entry("gpt2"),
            _entry("pause"),
            _entry("meta"),
            _entry("twin"),
            _entry("dense", "gpt2", "meta"),
        ),
        _THEIRS,
    ),
    "answers": ((Entry("full logits", "meta", full_logits=True), Entry("answers only", "meta")),),
    "prefill": (
        (_entry("gpt2"), _entry("pause"), _entry("meta"), _entry("dense", "gpt2", "meta")),
        _THEIRS,
    ),
    "decode": (
        (
            _entry("gpt2"),
            _entry("meta"),
            Entry("meta, static", "meta", ("meta",), static=True),
            Entry("pause, inserting", "pause", inserts=True),
            Entry("meta, inserting", "meta", ("gpt2", "meta"), inserts=True),
            Entry("dense, inserting", "dense", ("gpt2", "meta, inserting"), inserts=True),
        ),
        _THEIRS,
    ),
    "length": ((_entry("gpt2"), _entry("meta"), _entry("dense", "gpt2", "meta")),),
    # Steps, as in `train`. The second heat is one function, implemented twice.
    "compile": (
        _with_compiled("meta"),
        (
            *_with_compiled("gpt2-learned"),
            *_with_compiled("transformers", "gpt2-learned"),
        ),
    ),
}


@dataclass(kw_only=True)
class Unit:
    """A contestant's unit of work, and its size.

    Attributes:
        work: does it once.
        prepare: makes it repeatable; not timed.
        text_tokens: text tokens of all rows that it trains on, reads or writes.
        parameters: parameters of the model.
        products: matrix products of a forward pass.
        passes: forward passes.
        training: whether each pass has a backward pass.
        counted_flops: operations as PyTorch counts them, including the masked half of causal attention; None in
            decoding.
        reads: bytes that decoding must read; None elsewhere, where the products are the limit.
    """

    work: Callable[[], object]
    prepare: Callable[[], object] = lambda: None
    text_tokens: int
    parameters: int
    products: Sequence[Product] = ()
    passes: int = 1
    training: bool = False
    counted_flops: int | None = None
    reads: int | None = None

    @property
    def needed(self) -> int:
        """The limit of its speed, in bytes or in operations, as for all contestants of its heat."""
        return flops(self.products, training=self.training) if self.reads is None else self.reads


def make_unit(benchmark: Benchmark, entry: Entry, setting: Setting) -> Unit:
    """Build a contestant's unit of work, with a new model from a fixed seed."""
    torch.manual_seed(0)
    peer, shape = PEERS[entry.peer], SHAPES[setting.shape]
    if benchmark == "decode":
        return _decode(
            entry, setting, peer, peer.config(shape, setting.length + 2 * setting.new_tokens)
        )
    config = peer.config(shape, setting.length)
    if benchmark == "prefill":
        return _prefill(setting, peer, config)
    return _training_step(entry, setting, peer, config, answers=benchmark == "answers")


def _training_step(
    entry: Entry, setting: Setting, peer: Peer, config: MetaGPT2Config, *, answers: bool
) -> Unit:
    """Forward, backward, update. With `answers` only the end of each row is scored, as in fine-tuning."""
    ids, labels = _sequences(config, setting, setting.length)
    if answers:
        labels[:, :-ANSWER_TOKENS] = IGNORED_LABEL
    scored = ids.numel() if entry.full_logits else int((labels[:, 1:] != IGNORED_LABEL).sum())
    model: Any = peer.make(config).to(setting.device).train()
    batch = {"input_ids": ids, "labels": labels}
    if isinstance(model, MetaGPT2ForCausalLM):
        batch = with_positions(batch, config.meta_token_id, multiple=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    @torch.autocast(setting.device, torch.bfloat16, enabled=setting.dtype == "bfloat16")
    def loss() -> Tensor:
        if not entry.full_logits:
            return model(**batch, use_cache=False).loss
        logits = linear(model.lm_head, model.model(ids).last_hidden_state)
        return model.loss_function(logits, labels, config.vocab_size)

    forward: Callable[[], Tensor] = torch.compile(loss) if setting.compiled else loss

    def work() -> None:
        forward().backward()
        optimizer.step()
        optimizer.zero_grad()

    return _unit(setting, peer, config, model, ids, scored, training=True, work=work)


def _prefill(setting: Setting, peer: Peer, config: MetaGPT2Config) -> Unit:
    """Generate the first token after a prompt."""
    ids, model = _prompt(config, setting), _for_inference(peer, config, setting)
    options: dict[str, Any] = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": 1,
        "do_sample": False,
    }
    return _unit(
        setting,
        peer,
        config,
        model,
        ids,
        setting.batch,
        work=lambda: model.generate(ids, **options),
    )


def _unit(
    setting: Setting,
    peer: Peer,
    config: MetaGPT2Config,
    model: nn.Module,
    ids: Tensor,
    scored: int,
    **work: Any,
) -> Unit:
    """A unit of one pass over `ids`, with the logits of `scored` positions."""
    meta_tokens = _meta_tokens(ids, config)

    def products(*, skips_masked: bool) -> list[Product]:
        return forward_products(
            config,
            batch=setting.batch,
            length=setting.length,
            meta_tokens=meta_tokens,
            scored=scored,
            dense=peer.dense,
            skips_masked=skips_masked,
        )

    return Unit(
        text_tokens=setting.batch * (setting.length - meta_tokens),
        parameters=_count(model),
        products=products(skips_masked=True),
        counted_flops=flops(products(skips_masked=False), training=work.get("training", False)),
        **work,
    )


def _decode(entry: Entry, setting: Setting, peer: Peer, config: MetaGPT2Config) -> Unit:
    """Generate text after a context whose tokens, except the last, are cached."""
    ids, model = _prompt(config, setting), _for_inference(peer, config, setting)
    empty = (
        StaticCache(config, max_cache_len=setting.length + setting.new_tokens)
        if entry.static
        else None
    )
    with torch.inference_mode():
        context = model(
            ids[:, :-1], past_key_values=empty, use_cache=True, logits_to_keep=1
        ).past_key_values
    options: dict[str, Any] = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": setting.new_tokens,
    }
    if entry.inserts:
        options["meta_every"] = META_EVERY

    def prepare() -> None:
        options["past_key_values"] = copy.deepcopy(context)

    sizes: dict[str, Any] = {"batch": setting.batch, "dense": peer.dense}
    return Unit(
        work=lambda: model.generate(ids, do_sample=False, **options),
        prepare=prepare,
        text_tokens=setting.batch * setting.new_tokens,
        parameters=_count(model),
        products=forward_products(
            config, length=1, cached=setting.length + setting.new_tokens // 2, **sizes
        ),
        passes=setting.new_tokens,
        reads=decode_bytes(
            config,
            context=setting.length,
            context_meta=_meta_tokens(ids, config),
            new_tokens=setting.new_tokens,
            item_size=DTYPES[setting.dtype].itemsize,
            meta_every=options.get("meta_every"),
            **sizes,
        ),
    )


def products_unit(unit: Unit, setting: Setting) -> Unit:
    """A unit of the same matrix products and nothing else.

    Each product has its own buffer for weights, keys or values, which then come from memory as in the model.
    """
    scratch: dict[tuple[object, ...], Tensor] = {}

    def new(*shape: int) -> Tensor:
        return torch.full(shape, 0.01, dtype=DTYPES[setting.dtype], device=setting.device)

    def shared(role: str, *shape: int) -> Tensor:
        key = (role, *shape)
        if key not in scratch:
            scratch[key] = new(*shape)
        return scratch[key]

    # out = x w^T, and in training dx = out w and dw = out^T x: the layout of a linear layer. For few rows
    # out^T = w x^T, with at least two columns, is faster (see `linear`).
    jobs = []
    for p in unit.products:
        is_few = not unit.training and setting.device == "cpu" and p.rows <= FEW_ROWS
        rows = max(p.rows, 2) if is_few else p.rows
        x, w = shared("x", p.count, rows, p.inner), new(p.count, p.columns, p.inner)
        out = shared("out", p.count, rows, p.columns)
        if is_few:
            x, w, out = w, x, shared("out^T", p.count, p.columns, rows)
        dx, dw = (shared("dx", *x.shape), shared("dw", *w.shape)) if unit.training else (x, w)
        jobs.append((x, w, out, dx, dw))

    @torch.inference_mode()
    def work() -> None:
        for _ in range(unit.passes):
            for x, w, out, dx, dw in jobs:
                torch.bmm(x, w.mT, out=out)
                if unit.training:
                    torch.bmm(out, w, out=dx)
                    torch.bmm(out.mT, x, out=dw)

    return replace(unit, work=work, prepare=lambda: None)


def _sequences(config: MetaGPT2Config, setting: Setting, length: int) -> tuple[Tensor, Tensor]:
    """Random ids and labels, (batch, length), with meta-tokens as in pretraining if the model has one."""
    generator = np.random.default_rng(0)
    placement = "none" if config.meta_token_id is None else "uniform"
    text = length - meta_token_count(length, FRACTION, placement)
    pairs = [
        insert_meta_tokens(
            generator.integers(config.vocab_size - 1, size=text),
            meta_token_id=config.vocab_size - 1,
            block_size=length,
            fraction=FRACTION,
            placement=placement,
            generator=generator,
        )
        for _ in range(setting.batch)
    ]
    ids, labels = (
        torch.from_numpy(np.stack(part)).to(setting.device) for part in zip(*pairs, strict=True)
    )
    return ids, labels


def _prompt(config: MetaGPT2Config, setting: Setting) -> Tensor:
    """Random ids, (batch, length), whose last column is text."""
    ids, _ = _sequences(config, setting, setting.length - 1)
    return torch.cat([ids, torch.zeros_like(ids[:, :1])], dim=1)


def _meta_tokens(ids: Tensor, config: MetaGPT2Config) -> int:
    """Meta-tokens per row, the same number in each."""
    return 0 if config.meta_token_id is None else int((ids[0] == config.meta_token_id).sum())


def _for_inference(peer: Peer, config: MetaGPT2Config, setting: Setting) -> Any:
    model = peer.make(config).to(setting.device, DTYPES[setting.dtype]).eval().requires_grad_(False)
    if setting.compiled:
        model.compile()
    return model


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
