"""Does a meta-token's state hold what came before it? (paper, Figures 2, right, and 3, left)

All states of a layer share directions: any two text tokens can have a cosine similarity of 0.99. So the mean state of
the prompt's text tokens in the layer is subtracted first. And each meta-token has a control in the same
prompt, the nearest text token before it, which is compared with the text tokens before itself at the same distances.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import PreTrainedModel

from metatokens.analysis.observation import AttentionInputs, Observation, PromptIds, observe
from metatokens.analysis.samples import Samples
from metatokens.model.wrappers import takes_wrapped
from metatokens.records import About, KeyClass, Measurement
from metatokens.tasks.example import Example

DISTANCES = (*range(1, 17), *(2**i for i in range(5, 21)))  # the upper ends of bins
NEAR = 8  # text tokens before the final meta-token, mostly those of the question


@takes_wrapped
def residual(
    model: PreTrainedModel, examples: Sequence[Example], shared: About
) -> list[Measurement]:
    """Similarity of states in the residual stream, and the attention of the final meta-token; means over examples.

    - `similarity_centred`: cosine of the state of each meta-token but the final one (`subject` meta), or of its control
      (`subject` text), with the states of the text tokens before it, by layer and distance;
    - `attention_weight`: of the final meta-token, by module, layer, head and class of keys, and
      `attention_weight_if_uniform`, the weight of the class if attention were spread evenly;
    - `similarity_to_final_centred`: in the first example, cosine of the state at each position (`subject`: meta or
      text) with that of the final meta-token in the same layer.

    Args:
        model: is put into evaluation mode.
        examples: their prompts are read; each needs a meta-token.
        shared: the fields that all records share.

    Raises:
        UserError: if a prompt has no meta-token after some text, or the model's attention cannot be observed.
    """
    samples = Samples()
    for number, example in enumerate(examples):
        samples.next_example()
        prompt = PromptIds.of(example, model.config.meta_token_id)
        seen = observe(model, prompt.ids)
        units = _unit_states(prompt, seen)
        _similarities(samples, prompt, units)
        _attention_of_final(samples, prompt, seen)
        if number == 0:
            _similarities_to_final(samples, prompt, units)
    fields = shared.present_fields(position_embedding=model.config.position_embedding)
    return samples.measurements(analysis="residual", **fields)


def key_classes(prompt: PromptIds) -> list[KeyClass]:
    """The class of each position up to the final meta-token; the first that fits:

    `itself`; `earlier_meta`; `before_meta` and `after_meta`, the text tokens next to an earlier meta-token; `first`,
    where attention often goes when it looks for nothing; `near`, the last 8 text tokens; `other`.
    """
    *earlier, final = prompt.metas
    text = [position for position in range(final) if not prompt.is_meta[position]]
    # From the class that fits last to the one that fits first: each takes positions from those before it.
    members: dict[KeyClass, Iterable[int]] = {
        "near": text[-NEAR:],
        "first": [0],
        "after_meta": [meta + 1 for meta in earlier],
        "before_meta": [meta - 1 for meta in earlier if meta > 0],
        "earlier_meta": earlier,
        "itself": [final],
    }
    classes: list[KeyClass] = ["other"] * (final + 1)
    for key_class, positions in members.items():
        for position in positions:
            classes[position] = key_class
    return classes


def _unit_states(prompt: PromptIds, seen: Observation) -> Tensor:
    """The centred states of each layer, scaled to length 1, (layers + 1, length, width)."""
    states = torch.stack([of_layer.cpu() for of_layer in seen.states])
    centres = states[:, ~prompt.is_meta].mean(dim=1, keepdim=True)
    return normalize(states - centres, dim=-1)


def _similarities(samples: Samples, prompt: PromptIds, units: Tensor) -> None:
    for meta in prompt.metas[:-1]:
        control = prompt.text_before(meta)
        if control is None:
            continue
        for subject, position in (("meta", meta), ("text", control)):
            _similarities_before(samples, prompt, units, position, subject)


def _similarities_before(
    samples: Samples,
    prompt: PromptIds,
    units: Tensor,
    position: int,
    subject: str,
) -> None:
    """Add the similarities of the state at a position with those of the text tokens before it."""
    before = (~prompt.is_meta[:position]).nonzero()[:, 0]
    bins = torch.bucketize(position - before, torch.tensor(DISTANCES))
    for layer, unit in enumerate(units):
        cosines = unit[before] @ unit[position]
        for index in bins.unique().tolist():
            samples.add(
                cosines[bins == index],
                metric="similarity_centred",
                layer=layer,
                distance=DISTANCES[index],
                marker="context",
                subject=subject,
            )


def _attention_of_final(samples: Samples, prompt: PromptIds, seen: Observation) -> None:
    class_of_position = np.array(key_classes(prompt))
    # By module and class of keys, from each layer: a window may hide keys.
    uniform: defaultdict[tuple[str, str], list[Tensor]] = defaultdict(list)
    for (module, layer), inputs in seen.attention.items():
        logits = _final_logits(prompt, inputs)
        weights, is_visible = logits.softmax(-1), logits.isfinite().double()
        key_positions = inputs.positions[: logits.shape[1]].cpu().numpy()
        class_of_key = class_of_position[key_positions]
        is_of_all = len(inputs.positions) == len(prompt.ids)
        for keys in get_args(KeyClass) if is_of_all else ("itself", "earlier_meta"):
            is_of_class = torch.from_numpy(class_of_key == keys)
            visible_of_class = is_visible[:, is_of_class].sum(dim=1)
            uniform[module, keys].append((visible_of_class / is_visible.sum(dim=1)).mean())
            for head, weight in enumerate(weights[:, is_of_class].sum(dim=1)):
                samples.add(
                    weight,
                    metric="attention_weight",
                    module=module,
                    layer=layer,
                    head=head,
                    keys=keys,
                )
    for (module, keys), shares in uniform.items():
        share = torch.stack(shares).mean()
        samples.add(share, metric="attention_weight_if_uniform", module=module, keys=keys)


def _similarities_to_final(samples: Samples, prompt: PromptIds, units: Tensor) -> None:
    final = prompt.metas[-1]
    for layer, unit in enumerate(units):
        for position, cosine in enumerate(unit[: final + 1] @ unit[final]):
            samples.add(
                cosine,
                metric="similarity_to_final_centred",
                layer=layer,
                position=position,
                subject="meta" if prompt.is_meta[position] else "text",
            )


def _final_logits(prompt: PromptIds, inputs: AttentionInputs) -> Tensor:
    """The final meta-token's attention logits, (heads, keys up to itself); -inf where it does not see a key."""
    row = (inputs.positions == prompt.metas[-1]).nonzero()[0]
    return inputs.logits(row)[:, 0, : int(row) + 1].cpu()
