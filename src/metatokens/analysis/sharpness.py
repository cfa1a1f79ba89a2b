"""Does a meta-token sharpen attention? (paper, section 4.4, Theorem 4.1, Lemma E.1, Figure 2)

Theorem 4.1 says that boosting the logit of any one key lowers the entropy H of a row of attention. It does not: with
logits (5, 0), adding 1 to the second raises H from 0.040 to 0.090. What holds is dH/dt = -alpha (ln alpha + H) for a
key of weight alpha whose logit grows by t. So every boost lowers H where alpha >= exp(-H), and boosts that are small
enough raise it elsewhere. (Where alpha > exp(-H) at t = 0 it stays so: ln alpha + H has the derivative 1 - alpha > 0
wherever it is 0.) Measured here is how often that premise holds, and what became of the entropy there and elsewhere.

As in the paper, a model that reads its meta-tokens is compared with itself while their token embeddings are zero.
"""

import math
from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor
from transformers import PreTrainedModel

from metatokens.analysis.observation import AttentionInputs, Observation, Prompt, observe
from metatokens.analysis.samples import About, Samples
from metatokens.model.interventions import NoEmbedding, intervene
from metatokens.records import Measurement
from metatokens.tasks.example import Example


def entropy(logits: Tensor) -> Tensor:
    """Shannon entropy (nats) of softmax over the last dimension; a logit may be -inf."""
    return torch.special.entr(logits.softmax(-1)).sum(-1)


def log_odds(logits: Tensor, index: Tensor) -> Tensor:
    """ln(alpha / (1 - alpha)) of one entry of softmax, (..., entries) -> (...).

    Adding a constant to all logits leaves it as it is, and boosting the entry's logit by t adds t to it. So its change
    is the boost that the theorem speaks of, whatever happened to the other logits.

    Args:
        logits: (..., entries); two finite ones at least in each row.
        index: (...) int64, which entry.
    """
    others = logits.scatter(-1, index[..., None], -torch.inf)
    return _take(logits, index) - others.logsumexp(-1)


def entropy_slope(logits: Tensor, index: Tensor) -> Tensor:
    """dH/dt = -alpha (ln alpha + H), t being added to the logit of one entry, (..., entries) -> (...)."""
    log_alpha = _take(logits.log_softmax(-1), index)
    return -log_alpha.exp() * (log_alpha + entropy(logits))


def premise_holds(logits: Tensor, index: Tensor) -> Tensor:
    """Whether alpha > exp(-H) at one entry, so that every boost of it lowers H, (..., entries) -> (...) bool."""
    return _take(logits.log_softmax(-1), index) > -entropy(logits)


def entropy_bound(margin: Tensor, count: int) -> Tensor:
    """The largest entropy of `count` >= 2 weights of which one's logit exceeds the others' by `margin` >= 0 at least.

    Lemma E.1 says that H falls as the margin grows. H need not; this bound does, which is what its proof shows.
    """
    others = (count - 1) * torch.exp(-margin)  # their sum, relative to the one
    p = 1 / (1 + others)
    rest = others / (1 + others)
    return torch.special.entr(p) + torch.special.entr(rest) + rest * math.log(count - 1)


def sharpness(model: PreTrainedModel, examples: Sequence[Example], about: About) -> list[Measurement]:
    """What the meta-tokens' embeddings change, all of a prompt's being zeroed at once, averaged over examples.

    By attention module, layer and head, and over all layers and heads of a module together:

    - `attention_logit_change` and `attention_log_odds_change`, kept minus zeroed, of each query at each meta-token
      that it sees;
    - `attention_entropy_kept`, `_zeroed` and `_change` of each row that sees a meta-token;
    - `premise_holds`: in what fraction of these rows alpha > exp(-H) held in the zeroed pass for j*, the meta-token
      of the largest weight in it;
    - `entropy_fell`: in what fraction of the rows the entropy fell, by whether the premise held (`premise`) and
      whether the log-odds of j* rose (`boosted`). The theorem, corrected, speaks of those where both are true.

    Rows with a single key are left out. In meta-attention every key is a meta-token; of two, one's log-odds are the
    other's with the sign turned, so that their mean change says nothing there.

    At the meta-tokens within the prompt and at the last one (`marker`):

    - `output_top_logit_change`; for the last one also `output_answer_logit_change` and
      `output_answer_log_probability_change`, of the first token of the answer;
    - `output_entropy_kept`, `_zeroed` and `_change`, the meta-token being no output.

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
        kept = observe(model, prompt.ids)
        with intervene(model, NoEmbedding()):
            zeroed = observe(model, prompt.ids)
        for (module, layer), inputs in kept.attention.items():
            _compare_attention(samples, number, prompt, inputs, zeroed.attention[module, layer], module, layer)
        _compare_outputs(samples, number, prompt, model.config.meta_token_id, kept, zeroed)
    return samples.measurements(analysis="sharpness", position_embedding=model.config.position_embedding, **about)


def _compare_attention(
    samples: Samples,
    number: int,
    prompt: Prompt,
    kept: AttentionInputs,
    zeroed: AttentionInputs,
    module: str,
    layer: int,
) -> None:
    metas = prompt.is_meta.to(kept.positions.device)[kept.positions].nonzero()[:, 0]
    rows = torch.arange(max(1, int(metas[0])), len(kept.positions), device=metas.device)
    before, after = (inputs.logits(rows) for inputs in (zeroed, kept))  # (heads, rows, keys)
    seen = before[0].isfinite()  # not all earlier keys, where attention has a window
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
    entropy_before, entropy_after = entropy(before), entropy(after)
    change = entropy_after - entropy_before
    values = {
        "attention_logit_change": after[..., metas][:, sees] - before[..., metas][:, sees],
        "attention_log_odds_change": boosts[:, sees],
        "attention_entropy_kept": entropy_after,
        "attention_entropy_zeroed": entropy_before,
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
    samples: Samples, number: int, prompt: Prompt, meta_token_id: int, kept: Observation, zeroed: Observation
) -> None:
    after, before = (seen.logits[prompt.metas].double() for seen in (kept, zeroed))
    for logits in (after, before):
        logits[:, meta_token_id] = -torch.inf
    values = {
        "output_top_logit_change": after.amax(-1) - before.amax(-1),
        "output_entropy_kept": entropy(after),
        "output_entropy_zeroed": entropy(before),
        "output_entropy_change": entropy(after) - entropy(before),
    }
    for metric, value in values.items():
        samples.add(number, value[:-1], metric=metric, marker="context")
        samples.add(number, value[-1], metric=metric, marker="final")
    boost = (after - before)[-1, prompt.answer]
    samples.add(number, boost, metric="output_answer_logit_change", marker="final")
    gain = boost - (after.logsumexp(-1) - before.logsumexp(-1))[-1]
    samples.add(number, gain, metric="output_answer_log_probability_change", marker="final")


def _take(values: Tensor, index: Tensor) -> Tensor:
    return values.gather(-1, index[..., None])[..., 0]
