"""Does a meta-token's state hold what came before it? (paper, Figures 2, right, and 3, left)

Cosine similarity of states of the residual stream says little alone, since all states of a layer share directions:
those of two text tokens can be at 0.99 anywhere. So each meta-token is measured beside a control in the same prompt:
the nearest text token before it, one position earlier where no other meta-token is between them, compared with the
text tokens before itself at the same distances. And each similarity is taken twice, the second time (`_centred`) of
states less the mean state of the prompt's text tokens in that layer.
"""

from collections.abc import Iterator, Sequence
from typing import get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import PreTrainedModel

from metatokens.analysis.observation import AttentionInputs, Observation, Prompt, observe
from metatokens.analysis.samples import About, Samples
from metatokens.records import KeyClass, Measurement
from metatokens.tasks.example import Example

DISTANCES = (*range(1, 17), *(2**i for i in range(5, 21)))  # each holds those above the next smaller one
NEAR = 8  # text tokens before the final meta-token, most of them the question's


def residual(model: PreTrainedModel, examples: Sequence[Example], about: About) -> list[Measurement]:
    """States of the residual stream, and what the final meta-token attends to, averaged over examples.

    - `similarity` and `similarity_centred`: cosine of the state of each meta-token (`subject` meta; `marker` says
      which ones), or of its control (`subject` text), with those of the text tokens before it, by layer and distance;
    - `attention_weight`: what the final meta-token attends to, by module, layer, head and class of keys, and
      `attention_weight_if_uniform`, what evenly spread attention would give the class;
    - of the first example, by position (`subject` says what stands there): `similarity_to_final` and
      `similarity_to_final_centred`, cosine with the final meta-token's state in the same layer, and
      `attention_of_final`, the heads' mean, by module and layer.

    Args:
        model: is put into evaluation mode.
        examples: their prompts are read, each with a meta-token at least.
        about: fields of the records.

    Raises:
        UserError: if a prompt has no meta-token, or the model cannot be observed on it (`observe`).
    """
    samples = Samples()
    for number, example in enumerate(examples):
        prompt = Prompt.of(example, model.config.meta_token_id)
        seen = observe(model, prompt.ids)
        _similarities(samples, number, prompt, seen)
        _attention_of_final(samples, number, prompt, seen)
        if number == 0:
            _heat_maps(samples, prompt, seen)
    return samples.measurements(analysis="residual", position_embedding=model.config.position_embedding, **about)


def key_classes(prompt: Prompt) -> list[KeyClass]:
    """The class of each position up to the final meta-token, seen from there; the first that fits:

    `itself`; `earlier_meta`; `before_meta` and `after_meta`, the text tokens beside an earlier meta-token; `first`,
    where attention with nothing to look for often goes; `near`, the last 8 text tokens; `other`.
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


def _unit_states(prompt: Prompt, seen: Observation) -> Iterator[tuple[str, int, Tensor]]:
    """Name ending, layer and states of length 1, (length, width), as they are and centred."""
    for layer, states in enumerate(seen.states):
        states = states.cpu()
        yield "", layer, normalize(states, dim=-1)
        yield "_centred", layer, normalize(states - states[~prompt.is_meta].mean(dim=0), dim=-1)


def _similarities(samples: Samples, number: int, prompt: Prompt, seen: Observation) -> None:
    edges = torch.tensor(DISTANCES)
    for meta in prompt.metas:
        control = prompt.text_before(meta)
        if control is None:
            continue
        marker = "final" if meta == prompt.metas[-1] else "context"
        for subject, position in (("meta", meta), ("text", control)):
            before = (~prompt.is_meta[:position]).nonzero()[:, 0]
            bins = torch.bucketize(position - before, edges)
            for ending, layer, unit in _unit_states(prompt, seen):
                cosines = unit[before] @ unit[position]
                about = {"metric": "similarity" + ending, "marker": marker, "subject": subject, "layer": layer}
                for index in bins.unique().tolist():
                    samples.add(number, cosines[bins == index], **about, distance=DISTANCES[index])


def _attention_of_final(samples: Samples, number: int, prompt: Prompt, seen: Observation) -> None:
    classes = np.array(key_classes(prompt))
    described = set()  # a module's keys are the same in every layer
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


def _heat_maps(samples: Samples, prompt: Prompt, seen: Observation) -> None:
    subjects = ["meta" if is_meta else "text" for is_meta in prompt.is_meta]
    final = prompt.metas[-1]
    for ending, layer, unit in _unit_states(prompt, seen):
        for position, cosine in enumerate(unit[: final + 1] @ unit[final]):
            where = {"layer": layer, "position": position, "subject": subjects[position]}
            samples.add(0, cosine, metric="similarity_to_final" + ending, **where)
    for (module, layer), inputs in seen.attention.items():
        weights = _final_weights(prompt, inputs).mean(dim=0)
        for position, weight in zip(inputs.positions.tolist(), weights, strict=False):
            where = {"module": module, "layer": layer, "position": position, "subject": subjects[position]}
            samples.add(0, weight, metric="attention_of_final", **where)


def _final_weights(prompt: Prompt, inputs: AttentionInputs) -> Tensor:
    """The final meta-token's attention weights, (heads, keys up to itself)."""
    row = (inputs.positions == prompt.metas[-1]).nonzero()[0]
    return inputs.logits(row)[:, 0, : int(row) + 1].softmax(-1).cpu()
