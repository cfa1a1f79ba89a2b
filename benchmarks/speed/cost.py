"""The cost of a model's arithmetic, by formula: matrix products, parameters, the bytes that decoding reads.

The formulas give the limits of the ratios that the benchmarks measure. Like PyTorch's FLOP counter, they count matrix
products and nothing else: no norms, activations or copies.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from metatokens.model.configuration import MetaGPT2Config


@dataclass(frozen=True, slots=True)
class Product:
    """`count` products of a (rows, inner) matrix with an (inner, columns) matrix."""

    rows: int
    inner: int
    columns: int
    count: int = 1

    @property
    def flops(self) -> int:
        """Floating-point operations; a multiplication with an addition counts as two."""
        return 2 * self.count * self.rows * self.inner * self.columns


def flops(products: Iterable[Product], *, training: bool = False) -> int:
    """Operations of the products; in training each has two more of the same size, for its factors' gradients."""
    return sum(product.flops for product in products) * (3 if training else 1)


def forward_products(
    config: MetaGPT2Config,
    *,
    batch: int,
    length: int,
    meta_tokens: int = 0,
    scored: int | None = None,
    cached: int = 0,
    cached_meta: int = 0,
    dense: bool = False,
    skips_masked: bool = False,
) -> list[Product]:
    """The matrix products of one forward pass, in order.

    Args:
        config: the model's configuration.
        batch: rows of the input.
        length: positions of each row.
        meta_tokens: the largest number in a row of the input; other rows are padded to it.
        scored: positions, of all rows together, whose logits are computed. None means all.
        cached: positions of each row in the cache.
        cached_meta: meta-tokens among them.
        dense: meta-attention over all rows under a mask, as the paper computes it, instead of gathered.
        skips_masked: count causal attention of n positions among themselves as the (n + 1) / 2 keys a query that the
            function needs and a causal kernel computes (rounded down), instead of n, which PyTorch's counter takes. An
            explicit mask is never skipped.
    """
    width, heads = config.hidden_size, config.num_attention_heads
    inner = config.intermediate_size or 4 * width

    def attention(rows: int, keys: int, *, causal: bool = True) -> list[Product]:
        """Projections of `rows` positions, and their attention to `keys`, their own included."""
        seen = keys - rows // 2 if causal and skips_masked else keys
        return [
            Product(batch * rows, width, 3 * width),
            Product(rows, width // heads, seen, batch * heads),
            Product(rows, seen, width // heads, batch * heads),
            Product(batch * rows, width, width),
        ]

    products = []
    positions = batch * length
    for _ in range(config.num_hidden_layers):
        products += attention(length, cached + length)
        if config.second_attention == "causal" or (config.second_attention == "meta" and dense):
            products += attention(length, cached + length, causal=not dense)
        elif config.second_attention == "meta" and meta_tokens:
            products += attention(meta_tokens, cached_meta + meta_tokens, causal=cached_meta == 0)
        products += [Product(positions, width, inner), Product(positions, inner, width)]
    return [*products, Product(positions if scored is None else scored, width, config.vocab_size)]


def weights(config: MetaGPT2Config) -> tuple[int, int]:
    """Parameters that every decoding step reads (all except a table of positions), and the second attention's."""
    width, inner = config.hidden_size, config.intermediate_size or 4 * config.hidden_size
    norm = width * (1 + config.bias)
    attention = norm + 4 * width * width + 4 * width * config.bias
    feed_forward = norm + 2 * width * inner + (inner + width) * config.bias
    common = (
        config.num_hidden_layers * (attention + feed_forward) + norm + config.vocab_size * width
    )
    return common, 0 if config.second_attention == "none" else config.num_hidden_layers * attention


def decode_bytes(
    config: MetaGPT2Config,
    *,
    batch: int,
    context: int,
    context_meta: int,
    new_tokens: int,
    item_size: int,
    meta_every: int | None = None,
    dense: bool = False,
) -> int:
    """Bytes that generation must read: in each step the weights that it uses, and the keys and values that it sees.

    The first step reads the prompt's last token. Gathered meta-attention reads something only in a step that takes a
    meta-token along with its text token (see `MetaTokenGenerationMixin.generate`).

    Args:
        config: the model's configuration.
        batch: rows.
        context: positions of the prompt, all cached except the last.
        context_meta: meta-tokens among the cached ones.
        new_tokens: text tokens generated for each row.
        item_size: bytes of a number.
        meta_every: generated text tokens per inserted meta-token; None inserts none.
        dense: as in `forward_products`.
    """
    common, second = weights(config)
    # Keys and values of one position.
    entry = 2 * batch * config.num_hidden_layers * config.hidden_size
    numbers = 0
    for text in range(new_tokens):
        inserted, rides = (
            (max(text - 1, 0) // meta_every, text % meta_every == 0 < text)
            if meta_every
            else (0, False)
        )
        seen = entry * (context - 1 + text + inserted)
        numbers += common + seen
        if config.second_attention == "causal" or dense:
            numbers += second + seen
        elif config.second_attention == "meta" and rides:
            numbers += second + entry * (context_meta + inserted)
    return numbers * item_size
