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
from metatokens.model.configuration import never_generated
from metatokens.model.interventions import Intervention, intervene
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
def sharpness(
    model: PreTrainedModel, examples: Sequence[Example], shared: About
) -> list[Measurement]:
    """The effect of the meta-tokens' embeddings: a pass with them, minus a pass in which they are zero.

    Means over examples, for all layers and heads of each attention module together:

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
        shared: the fields that all records share.

    Raises:
        UserError: if a prompt has no meta-token after some text, or the model's attention cannot be observed.
    """
    samples = Samples()
    for example in examples:
        samples.next_example()
        prompt = PromptIds.of(example, model.config.meta_token_id)
        intact = observe(model, prompt.ids)
        with intervene(model, Intervention("no_embed")):
            zeroed = observe(model, prompt.ids)
        for (module, layer), inputs in intact.attention.items():
            without = zeroed.attention[module, layer]
            _compare_attention(samples, prompt, module, inputs, without)
        _compare_outputs(samples, prompt, never_generated(model.config), intact, zeroed)
    fields = shared.present_fields(position_embedding=model.config.position_embedding)
    return samples.measurements(analysis="sharpness", **fields)


def _compare_attention(
    samples: Samples,
    prompt: PromptIds,
    module: str,
    intact: AttentionInputs,
    zeroed: AttentionInputs,
) -> None:
    """Add what the embeddings change in the rows of one module that see a meta-token."""
    metas = prompt.is_meta.to(intact.positions.device)[intact.positions].nonzero()[:, 0]
    before, after = zeroed.logits(), intact.logits()  # (heads, rows, keys)
    is_seen = before[0].isfinite()  # fewer than all earlier keys in windowed attention
    sees = is_seen[:, metas]  # (rows, metas)
    is_counted = sees.any(dim=1) & (is_seen.sum(dim=1) > 1)
    before, after, sees = before[:, is_counted], after[:, is_counted], sees[is_counted]
    logit_changes = after[..., metas] - before[..., metas]  # (heads, rows, metas)
    boosts = torch.stack([_change_of_log_odds(before, after, int(meta)) for meta in metas], dim=-1)
    largest = before[..., metas].argmax(-1)  # j* of each row, (heads, rows)
    entropy_change = entropy(after) - entropy(before)
    holds = premise_holds(before, metas[largest])
    rose = _take(boosts, largest) > 0
    values = {
        "attention_logit_change": logit_changes[:, sees],
        "attention_log_odds_change": boosts[:, sees],
        "attention_entropy_change": entropy_change,
        "premise_holds": holds,
    }
    for metric, of_heads in values.items():
        samples.add(of_heads, metric=metric, module=module)
    for premise, boosted in product((True, False), repeat=2):
        fell = entropy_change[(holds == premise) & (rose == boosted)] < 0
        samples.add(fell, metric="entropy_fell", premise=premise, boosted=boosted, module=module)


def _change_of_log_odds(before: Tensor, after: Tensor, key: int) -> Tensor:
    index = torch.full(before.shape[:-1], key, device=before.device)
    return log_odds(after, index) - log_odds(before, index)


def _compare_outputs(
    samples: Samples,
    prompt: PromptIds,
    never: list[int],
    intact: Observation,
    zeroed: Observation,
) -> None:
    after = intact.logits[prompt.metas].double()
    before = zeroed.logits[prompt.metas].double()
    after[:, never] = -torch.inf
    before[:, never] = -torch.inf
    values = {
        "output_top_logit_change": after.amax(-1) - before.amax(-1),
        "output_entropy_change": entropy(after) - entropy(before),
    }
    for metric, value in values.items():
        samples.add(value[:-1], metric=metric, marker="context")
        samples.add(value[-1], metric=metric, marker="final")
    boost = (after - before)[-1, prompt.answer]
    samples.add(boost, metric="output_answer_logit_change", marker="final")


def _take(values: Tensor, index: Tensor) -> Tensor:
    return values.gather(-1, index[..., None])[..., 0]
