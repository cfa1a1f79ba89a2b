"""Does a meta-token sharpen attention? (paper, section 4.4, Theorem 4.1, Lemma E.1, Figure 2)

Theorem 4.1 claims that boosting the logit of any one key lowers the entropy H of a row of attention. It does not: with
logits (5, 0), adding 1 to the second raises H from 0.040 to 0.090. If the logit of a key of weight alpha grows by t,
dH/dt = -alpha (ln alpha + H). So every boost lowers H where alpha >= exp(-H), and small boosts raise it elsewhere.
(The premise alpha > exp(-H) stays true while t grows: wherever ln alpha + H is 0, its derivative is 1 - alpha > 0.)
`sharpness` measures how often the premise holds, and how the entropy changes where it does and where it does not.

As in the paper, a model is compared with itself while the embeddings of its meta-tokens are zero.
"""

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor
from transformers import PreTrainedModel

from metatokens.analysis.observation import AttentionInputs, Observation, PromptIds, observe
from metatokens.analysis.samples import Samples
from metatokens.model.interventions import NoEmbedding, intervene
from metatokens.model.wrappers import takes_wrapped
from metatokens.records import About, Measurement
from metatokens.tasks.example import Example


def entropy(logits: Tensor) -> Tensor:
    """Shannon entropy (nats) of softmax over the last dimension; a logit may be -inf."""
    return torch.special.entr(logits.softmax(-1)).sum(-1)


def log_odds(logits: Tensor, index: Tensor) -> Tensor:
    """ln(alpha / (1 - alpha)) of one entry of softmax, (..., entries) -> (...).

    Adding a constant to all logits does not change it; boosting the entry's logit by t adds t. So its change is the
    boost of the theorem, however the other logits changed.

    Args:
        logits: (..., entries), each row with at least two finite ones.
        index: (...) int64, the entry.
    """
    others = logits.scatter(-1, index[..., None], -torch.inf)
    return _take(logits, index) - others.logsumexp(-1)


def premise_holds(logits: Tensor, index: Tensor) -> Tensor:
    """Whether alpha > exp(-H) at one entry, so that every boost of it lowers H, (..., entries) -> (...) bool."""
    return _take(logits.log_softmax(-1), index) > -entropy(logits)


@takes_wrapped
def sharpness(model: PreTrainedModel, examples: Sequence[Example], about: About) -> list[Measurement]:
    """The effect of the meta-tokens' embeddings: a pass with them, minus a pass in which they are zero.

    Means over examples, for each attention module, layer and head, and for all layers and heads of a module together:

    - `attention_logit_change` and `attention_log_odds_change` of each query at each meta-token that it sees;
    - `attention_entropy_change` of each row that sees a meta-token;
    - `premise_holds`: the share of these rows with alpha > exp(-H) in the zeroed pass at j*, the meta-token with the
      largest weight in that pass;
    - `entropy_fell`: the share of rows whose entropy fell, by whether the premise held (`premise`) and whether the
      log-odds of j* rose (`boosted`). The corrected theorem is about the rows where both are true.

    Rows with a single key are left out. In meta-attention every key is a meta-token; between two keys, one's log-odds
    are the negative of the other's, so that their mean change means nothing there.

    At the meta-tokens within the prompt and at the last one (`marker`):

    - `output_top_logit_change` and `output_entropy_change`, both without the meta-token's own logit;
    - at the last one also `output_answer_logit_change`, of the answer's first token.

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
        kept = observe(model, prompt.ids)
        with intervene(model, NoEmbedding()):
            zeroed = observe(model, prompt.ids)
        for (module, layer), inputs in kept.attention.items():
            _compare_attention(samples, number, prompt, inputs, zeroed.attention[module, layer], module, layer)
        _compare_outputs(samples, number, prompt, model.config.meta_token_id, kept, zeroed)
    shared = about.present_fields(position_embedding=model.config.position_embedding)
    return samples.measurements(analysis="sharpness", **shared)


def _compare_attention(
    samples: Samples,
    number: int,
    prompt: PromptIds,
    kept: AttentionInputs,
    zeroed: AttentionInputs,
    module: str,
    layer: int,
) -> None:
    metas = prompt.is_meta.to(kept.positions.device)[kept.positions].nonzero()[:, 0]
    rows = torch.arange(max(1, int(metas[0])), len(kept.positions), device=metas.device)
    before, after = (inputs.logits(rows) for inputs in (zeroed, kept))  # (heads, rows, keys)
    seen = before[0].isfinite()  # fewer than all earlier keys in windowed attention
    sees = seen[:, metas]
    counted = sees.any(dim=1) & (seen.sum(dim=1) > 1)
    before, after, sees = before[:, counted], after[:, counted], sees[counted]  # `sees` is (rows, metas)
    boosts = torch.stack(
        [
            log_odds(after, index) - log_odds(before, index)
            for index in (torch.full(after.shape[:2], int(meta), device=metas.device) for meta in metas)
        ],
        dim=-1,
    )  # (heads, rows, metas)
    most = before[..., metas].argmax(-1)
    premise, boosted = premise_holds(before, metas[most]), _take(boosts, most) > 0
    change = entropy(after) - entropy(before)
    values = {
        "attention_logit_change": after[..., metas][:, sees] - before[..., metas][:, sees],
        "attention_log_odds_change": boosts[:, sees],
        "attention_entropy_change": change,
        "premise_holds": premise,
    }
    for head in range(len(change)):
        for place in ({"layer": layer, "head": head}, {}):
            for metric, value in values.items():
                samples.add(number, value[head], metric=metric, module=module, **place)
            for held, rose in product((True, False), repeat=2):
                group = (premise[head] == held) & (boosted[head] == rose)
                fields = {"metric": "entropy_fell", "premise": held, "boosted": rose, "module": module}
                samples.add(number, change[head][group] < 0, **fields, **place)


@torch.inference_mode()
def _compare_outputs(
    samples: Samples, number: int, prompt: PromptIds, meta_token_id: int, kept: Observation, zeroed: Observation
) -> None:
    after, before = (seen.logits[prompt.metas].double() for seen in (kept, zeroed))
    for logits in (after, before):
        logits[:, meta_token_id] = -torch.inf
    values = {
        "output_top_logit_change": after.amax(-1) - before.amax(-1),
        "output_entropy_change": entropy(after) - entropy(before),
    }
    for metric, value in values.items():
        samples.add(number, value[:-1], metric=metric, marker="context")
        samples.add(number, value[-1], metric=metric, marker="final")
    boost = (after - before)[-1, prompt.answer]
    samples.add(number, boost, metric="output_answer_logit_change", marker="final")


def _take(values: Tensor, index: Tensor) -> Tensor:
    return values.gather(-1, index[..., None])[..., 0]
