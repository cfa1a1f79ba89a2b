"""Views of a prompt, and cuts: edges of attention that a forward pass lacks.

A view says what a question sees: all text (`in_sight`), or the meta-tokens of its document alone (`covered`). A cut
then removes edges from one of the two attentions, in all layers or in one, in all heads or in one.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from metatokens.tasks.example import Encoded
from metatokens.tasks.landmarks_alone import LandmarksAlone

Text = Literal["in_sight", "covered"]

# Kinds of positions in a prompt with its answer.
DOCUMENT, LANDMARK, QUESTION, QUESTION_MARKER = range(4)
ASKING = (QUESTION, QUESTION_MARKER)
MARKERS = (LANDMARK, QUESTION_MARKER)


class View(LandmarksAlone):
    """The masks of a task's examples, with the text of the document in sight or covered."""

    def __init__(self, model: Any, tokenizer: Any, text: Text):
        super().__init__(model, tokenizer)
        self.text = text
        self.kinds: Tensor  # (batch, length), of the batch whose mask was made last

    def mask(self, input_ids: Tensor, examples: Sequence[Encoded]) -> Tensor:
        """True where a query sees a key, (batch, 1, length, length), for `input_ids` (batch, length)."""
        length = input_ids.shape[1]
        starts = torch.tensor([self.start(example) for example in examples])
        is_question = torch.arange(length) >= starts[:, None]
        is_marker = input_ids == self._meta_token_id
        self.kinds = is_question * QUESTION + is_marker * LANDMARK
        if self.text == "covered":
            return super().mask(input_ids, examples)
        return torch.ones(len(examples), 1, length, length, dtype=torch.bool).tril()


@dataclass(frozen=True)
class Cut:
    """The edges from keys of some kinds to queries of some kinds; a token always sees itself.

    Attributes:
        name: of the cut.
        attention: the one whose edges are removed.
        queries, keys: the kinds of positions between which there is no edge.
        others: whether all other edges are removed instead.
    """

    name: str
    attention: Literal["first", "second"]
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    others: bool = False

    def kept(self, kinds: Tensor) -> Tensor:
        """Which edges are kept, (batch, queries, keys) bool, for the kinds (batch, length) of the positions."""
        is_query = torch.isin(kinds, torch.tensor(self.queries))[:, :, None]
        is_key = torch.isin(kinds, torch.tensor(self.keys))[:, None, :]
        is_named = is_query & is_key
        is_itself = torch.eye(kinds.shape[1], dtype=torch.bool)
        return (is_named if self.others else ~is_named) | is_itself


# What the answer could pass through, from the text to the answer. A landmark reads the text by one of the attentions;
# landmarks may read one another; and the question reads landmarks by one of the attentions.
CUTS = (
    Cut("landmark reads text, first attention", "first", (LANDMARK,), (DOCUMENT,)),
    Cut("landmark reads text, second attention", "second", (LANDMARK,), (DOCUMENT,)),
    Cut("landmark reads landmarks, first attention", "first", (LANDMARK,), (LANDMARK,)),
    Cut("landmark reads landmarks, second attention", "second", (LANDMARK,), (LANDMARK,)),
    Cut("question reads landmarks, first attention", "first", ASKING, (LANDMARK,)),
    Cut("question reads landmarks, second attention", "second", ASKING, (LANDMARK,)),
)
# The second attention as meta-attention has it: every edge except those between meta-tokens is cut.
MARKERS_ALONE = Cut(
    "second attention among meta-tokens alone", "second", MARKERS, MARKERS, others=True
)
# The whole of meta-attention.
NO_EXCHANGE = Cut("second attention without edges between meta-tokens", "second", MARKERS, MARKERS)


@contextmanager
def cutting(
    model: Any, view: View, cut: Cut, layers: Sequence[int], head: int | None = None
) -> Iterator[None]:
    """Run a model without the edges of a cut.

    Args:
        model: of this package; attention `sdpa`. It has to be given the masks of `view`.
        view: made the mask of the batch.
        cut: the edges.
        layers: where they are removed.
        head: the only head that loses them; None: all do.
    """

    def hide(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mask = kwargs["mask"]  # (batch, 1, length, length), True where a query sees a key
        is_left = cut.kept(view.kinds)[:, None].to(mask.device)
        if head is not None:
            is_other_head = torch.arange(model.config.num_attention_heads) != head
            is_left = is_left | is_other_head[None, :, None, None].to(mask.device)
        return args, kwargs | {"mask": mask & is_left}

    with ExitStack() as stack:
        for layer in layers:
            block = model.model.layers[layer]
            module = block.attention if cut.attention == "first" else block.second_attention
            stack.enter_context(module.register_forward_pre_hook(hide, with_kwargs=True))
        yield
