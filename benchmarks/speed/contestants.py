"""The benchmarks: which models take part, what a unit of their work is, and what it needs."""

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
from metatokens.model.attention import FEW_ROWS, linear
from metatokens.model.configuration import MetaGPT2Config
from metatokens.model.modeling import MetaGPT2ForCausalLM
from metatokens.recipe import Device, Dtype
from metatokens.records import Benchmark
from metatokens.training.batches import with_positions

FRACTION = 0.1  # of a sequence's positions that are meta-tokens (the paper's k)
META_EVERY = 10  # generated text tokens to an inserted meta-token
ANSWER_TOKENS = 4  # labels of a row in `answers`
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all contestants of a run share.

    Attributes:
        shape: name of the models' sizes.
        length: positions of a sequence: of a training block, a prompt, or the context of decoding.
        batch: sequences.
        new_tokens: text tokens that decoding adds to each.
        rounds, warmup: timed rounds, and untimed ones before them.
        threads: of PyTorch, on the CPU.
        dtype: `float32` or `bfloat16`: in training that of autocast over float32 weights, otherwise the weights'.
        device: `cpu` or `cuda`.
        compiled: whether the models go through `torch.compile`.

    Raises:
        UserError: if there is no such device, or a number is too small.
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
            raise UserError("device cuda is not available.")
        if self.length < 16 or min(self.batch, self.new_tokens, self.rounds, self.warmup, self.threads) < 1:
            raise UserError("a benchmark needs a length of at least 16, and at least 1 of everything else.")


@dataclass(frozen=True)
class Entry:
    """A contestant.

    Attributes:
        name: what its figures are filed under.
        peer: its model, in `peers.PEERS`.
        against: contestants that it is compared with; none means the heat's first.
        inserts: whether meta-tokens are inserted while decoding.
        full_logits: whether a fine-tuning step computes the logits of all positions.
        static: whether it decodes from a cache of a fixed size.
        compiled: whether it goes through `torch.compile` whatever the setting says.
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

# The contestants of a heat take turns; the first one is the baseline. Memory holds the models of one heat at a time.
HEATS: dict[Benchmark, tuple[tuple[Entry, ...], ...]] = {
    "train": (
        # What reads and scores the same blocks, with nothing else in memory: where much is, the kernel takes longer to
        # hand some out, the more of it a model asks for.
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
    "prefill": ((_entry("gpt2"), _entry("pause"), _entry("meta"), _entry("dense", "gpt2", "meta")), _THEIRS),
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
    """A contestant's unit of work, and what it amounts to.

    Attributes:
        work: does it once.
        prepare: makes it possible once more; not timed.
        text_tokens: that it trains on, reads or writes, of all rows.
        parameters: of the model.
        products: that a forward pass needs.
        passes: forward passes of a unit.
        training: whether each has a backward pass.
        counted_flops: operations as PyTorch counts them, the masked half of causal attention included; None in
            decoding.
        reads: bytes that must be read; None where the products are the limit, everywhere but in decoding.
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
        """What limits it: bytes or operations, the same for all contestants of a heat."""
        return flops(self.products, training=self.training) if self.reads is None else self.reads


def make_unit(benchmark: Benchmark, entry: Entry, setting: Setting) -> Unit:
    """The contestant's unit of work in a benchmark, its model made afresh from a fixed seed."""
    torch.manual_seed(0)
    peer, shape = PEERS[entry.peer], SHAPES[setting.shape]
    if benchmark == "decode":
        return _decode(entry, setting, peer, peer.config(shape, setting.length + 2 * setting.new_tokens))
    config = peer.config(shape, setting.length)
    if benchmark == "prefill":
        return _prefill(setting, peer, config)
    return _training_step(entry, setting, peer, config, answers=benchmark == "answers")


def _training_step(entry: Entry, setting: Setting, peer: Peer, config: MetaGPT2Config, *, answers: bool) -> Unit:
    """Forward, backward, update. `answers` scores the end of each row alone, as fine-tuning does."""
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
    """From a prompt to its first new token, through `generate()`."""
    ids, model = _prompt(config, setting), _for_inference(peer, config, setting)
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 1, "do_sample": False}
    return _unit(setting, peer, config, model, ids, setting.batch, work=lambda: model.generate(ids, **options))


def _unit(
    setting: Setting, peer: Peer, config: MetaGPT2Config, model: nn.Module, ids: Tensor, scored: int, **work: Any
) -> Unit:
    """One pass over `ids`, `scored` of them with logits."""
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
    """New text tokens after a context that is in the cache but for its last token, through `generate()`."""
    ids, model = _prompt(config, setting), _for_inference(peer, config, setting)
    empty = StaticCache(config, max_cache_len=setting.length + setting.new_tokens) if entry.static else None
    with torch.inference_mode():
        context = model(ids[:, :-1], past_key_values=empty, use_cache=True, logits_to_keep=1).past_key_values
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": setting.new_tokens}
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
        products=forward_products(config, length=1, cached=setting.length + setting.new_tokens // 2, **sizes),
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
    """The matrix products of another contestant's unit, and nothing else.

    Weights, keys and values are buffers of their own, so that they come from memory as in the model.
    """
    scratch: dict[tuple[object, ...], Tensor] = {}

    def new(*shape: int) -> Tensor:
        return torch.full(shape, 0.01, dtype=DTYPES[setting.dtype], device=setting.device)

    def shared(role: str, *shape: int) -> Tensor:
        key = (role, *shape)
        if key not in scratch:
            scratch[key] = new(*shape)
        return scratch[key]

    # out = x w^T, and in training dx = out w and dw = out^T x: the layout of a linear layer. For few rows the faster
    # out^T = w x^T, with two columns at least (see `linear`).
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
    """Random ids and their labels, (batch, length) each, with meta-tokens as in pretraining if the model has one."""
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
    ids, labels = (torch.from_numpy(np.stack(part)).to(setting.device) for part in zip(*pairs, strict=True))
    return ids, labels


def _prompt(config: MetaGPT2Config, setting: Setting) -> Tensor:
    """Random ids (batch, length) that end in a text token."""
    ids, _ = _sequences(config, setting, setting.length - 1)
    return torch.cat([ids, torch.zeros_like(ids[:, :1])], dim=1)


def _meta_tokens(ids: Tensor, config: MetaGPT2Config) -> int:
    """Meta-tokens of each row; all rows have as many."""
    return 0 if config.meta_token_id is None else int((ids[0] == config.meta_token_id).sum())


def _for_inference(peer: Peer, config: MetaGPT2Config, setting: Setting) -> Any:
    model = peer.make(config).to(setting.device, DTYPES[setting.dtype]).eval().requires_grad_(False)
    if setting.compiled:
        model.compile()
    return model


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
