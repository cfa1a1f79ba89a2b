"""Does a meta-token's state hold what came before it? (paper, Figures 2, right, and 3, left)

All states of a layer share directions: any two text tokens can have a cosine similarity of 0.99. So the mean state of
the prompt's text tokens in the layer is subtracted first. And each meta-token has a control in the same
prompt, the nearest text token before it, which is compared with the text tokens before itself at the same distances.
"""

from collections.abc import Sequence
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
def residual(model: PreTrainedModel, examples: Sequence[Example], about: About) -> list[Measurement]:
    """Similarity of states in the residual stream, and the attention of the final meta-token; means over examples.

    - `similarity_centred`: cosine of the state of each meta-token (`subject` meta, by `marker`), or of its control
      (`subject` text), with the states of the text tokens before it, by layer and distance;
    - `attention_weight`: of the final meta-token, by module, layer, head and class of keys, and
      `attention_weight_if_uniform`, the weight of the class if attention were spread evenly;
    - `similarity_to_final_centred`: in the first example, cosine of the state at each position (`subject`: meta or
      text) with that of the final meta-token in the same layer.

    Args:
        model: is put into evaluation mode.
        examples: their prompts are read; each needs a meta-token.
        about: the fields that all records share.

    Raises:
        UserError: if a prompt has no meta-token after some text, or the model's attention cannot be observed.
    """
    samples = Samples()
    for number, example in enumerate(examples):
        prompt = PromptIds.of(example, model.config.meta_token_id)
        seen = observe(model, prompt.ids)
        units = _unit_states(prompt, seen)
        _similarities(samples, number, prompt, units)
        _attention_of_final(samples, number, prompt, seen)
        if number == 0:
            _similarities_to_final(samples, prompt, units)
    shared = about.present_fields(position_embedding=model.config.position_embedding)
    return samples.measurements(analysis="residual", **shared)


def key_classes(prompt: PromptIds) -> list[KeyClass]:
    """The class of each position up to the final meta-token; the first that fits:

    `itself`; `earlier_meta`; `before_meta` and `after_meta`, the text tokens next to an earlier meta-token; `first`,
    where attention often goes when it looks for nothing; `near`, the last 8 text tokens; `other`.
    """
    *earlier, final = prompt.metas
    near = [i for i in range(final) if not prompt.is_meta[i]][-NEAR:]

    def classify(position: int) -> KeyClass:
        if position == final:
            return "itself"
        if prompt.is_meta[position]:
            return "earlier_meta"
        if position + 1 in earlier:
            return "before_meta"
        if position - 1 in earlier:
            return "after_meta"
        if position == 0:
            return "first"
        return "near" if position in near else "other"

    return [classify(position) for position in range(final + 1)]


def _unit_states(prompt: PromptIds, seen: Observation) -> list[Tensor]:
    """The centred states of each layer, scaled to length 1, (length, width)."""
    layers = (states.cpu() for states in seen.states)
    return [normalize(states - states[~prompt.is_meta].mean(dim=0), dim=-1) for states in layers]


def _similarities(samples: Samples, number: int, prompt: PromptIds, units: Sequence[Tensor]) -> None:
    edges = torch.tensor(DISTANCES)
    for meta in prompt.metas:
        control = prompt.text_before(meta)
        if control is None:
            continue
        marker = "final" if meta == prompt.metas[-1] else "context"
        for subject, position in (("meta", meta), ("text", control)):
            before = (~prompt.is_meta[:position]).nonzero()[:, 0]
            bins = torch.bucketize(position - before, edges)
            for layer, unit in enumerate(units):
                cosines = unit[before] @ unit[position]
                fields = {"metric": "similarity_centred", "marker": marker, "subject": subject, "layer": layer}
                for index in bins.unique().tolist():
                    samples.add(number, cosines[bins == index], **fields, distance=DISTANCES[index])


def _attention_of_final(samples: Samples, number: int, prompt: PromptIds, seen: Observation) -> None:
    classes = np.array(key_classes(prompt))
    described = set()  # modules; the keys of one are the same in every layer
    for (module, layer), inputs in seen.attention.items():
        weights = _final_weights(prompt, inputs)
        among = classes[inputs.positions[: weights.shape[1]].cpu().numpy()]
        possible = get_args(KeyClass) if len(inputs.positions) == len(prompt.ids) else ("itself", "earlier_meta")
        for keys in possible:
            here = torch.from_numpy(among == keys)
            if module not in described:
                samples.add(
                    number, here.double().mean(), metric="attention_weight_if_uniform", module=module, keys=keys
                )
            for head, weight in enumerate(weights[:, here].sum(dim=1)):
                samples.add(number, weight, metric="attention_weight", module=module, layer=layer, head=head, keys=keys)
        described.add(module)


def _similarities_to_final(samples: Samples, prompt: PromptIds, units: Sequence[Tensor]) -> None:
    final = prompt.metas[-1]
    for layer, unit in enumerate(units):
        for position, cosine in enumerate(unit[: final + 1] @ unit[final]):
            where = {"layer": layer, "position": position, "subject": "meta" if prompt.is_meta[position] else "text"}
            samples.add(0, cosine, metric="similarity_to_final_centred", **where)


def _final_weights(prompt: PromptIds, inputs: AttentionInputs) -> Tensor:
    """The final meta-token's attention weights, (heads, keys up to itself)."""
    row = (inputs.positions == prompt.metas[-1]).nonzero()[0]
    return inputs.logits(row)[:, 0, : int(row) + 1].softmax(-1).cpu()
