"""How much of the answer a state tells, by how many nats of it are kept (paper, section 5, Figure 3, Theorem 5.1).

A variational information bottleneck (Alemi et al., 2017) on a frozen model: a code z is drawn from
N(mu(h), diag(sigma(h)^2)), with h the final state at one position, and a linear softmax guesses the answer from z.
Trained is distortion + beta * rate. The distortion is the cross-entropy -ln q(y | z), the rate is
KL(q(z | h) || N(0, I)), never below the information I(h; z) that the code has of the state; all are in nats.

Theorem 5.1 compares models with and without meta-tokens, Figure 3 two positions of one model. Both are measured: the
last meta-token and the last text token of the prompt, for whatever model is given. The theorem would follow if one
model contained the other; trained models do not, so nothing is assumed. What does follow, for the examples that a code
is scored on, is distortion >= H(y) - information >= H(y) - rate, with H(y) the entropy of their answers.

The paper leaves open: mu and sigma (here linear, softplus after sigma), the size of z (32), the learning rate.
The state is the one that the head reads, after the last LayerNorm, each feature scaled to mean 0 and variance 1 over
the examples trained on. The answer is its first token, among the answers that occur.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softplus
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from metatokens.analysis.observation import Prompt
from metatokens.analysis.samples import About, summary
from metatokens.decoder import decoder_of
from metatokens.errors import UserError
from metatokens.evaluation.perplexity import unigram_entropy
from metatokens.model.interventions import Intervention, intervene
from metatokens.records import Measurement, Part
from metatokens.tasks.example import Example

BETAS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # the paper's
CODE_SIZE = 32
DRAWS = 4  # of z for each example, where a code is scored


@dataclass(frozen=True, slots=True)
class Schedule:
    """How a bottleneck is trained, by Adam.

    Attributes:
        batch: examples of a step.
        epochs: passes over the examples.
        learning_rate: falls linearly to 0.
    """

    batch: int
    epochs: int
    learning_rate: float


PAPER_EXAMPLES = 50
PAPER_SCHEDULE = Schedule(batch=1, epochs=5, learning_rate=1e-2)  # at Adam's usual 1e-3 it is worse than guessing
SCHEDULE = Schedule(batch=250, epochs=100, learning_rate=3e-2)  # within a few per cent of four times as many passes


class Bottleneck(nn.Module):
    """Encoder and decoder of a code of `CODE_SIZE` numbers."""

    def __init__(self, width: int, answers: int):
        super().__init__()
        self.encoder = nn.Linear(width, 2 * CODE_SIZE)
        self.decoder = nn.Linear(CODE_SIZE, answers)

    def encode(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """mu and sigma of the codes, each (examples, code size), of states (examples, width)."""
        mu, raw = self.encoder(states).chunk(2, dim=-1)
        return mu, softplus(raw)


def draw_code(mu: Tensor, sigma: Tensor, generator: torch.Generator) -> Tensor:
    """z ~ N(mu, diag(sigma^2)), differentiable in both."""
    return mu + sigma * torch.randn(mu.shape, generator=generator, dtype=mu.dtype)


def code_rate(mu: Tensor, sigma: Tensor) -> Tensor:
    """KL(N(mu, diag(sigma^2)) || N(0, I)) in nats, (examples, code size) -> (examples,)."""
    return (mu**2 + sigma**2 - 1 - 2 * sigma.log()).sum(dim=-1) / 2


def code_information(z: Tensor, mu: Tensor, sigma: Tensor) -> Tensor:
    """ln q(z_i | h_i) - ln q(z_i), q(z) being the mean of the examples' own q(z | h), (examples,).

    Its expectation is the mutual information of code and example, at most ln(examples) and at most the rate.

    Args:
        z: a code drawn for each example, (examples, code size), like mu and sigma.
    """
    z, mu, sigma = z.double(), mu.double(), sigma.double()
    precision = sigma**-2
    # The density of each code under each example, the square of z - mu multiplied out; 2 pi cancels.
    squares = z**2 @ precision.T - 2 * z @ (mu * precision).T + (mu**2 * precision).sum(dim=-1)
    log_density = -squares / 2 - sigma.log().sum(dim=-1)
    return log_density.diagonal() - log_density.logsumexp(dim=1) + math.log(len(z))


def fit(states: Tensor, answers: Tensor, *, classes: int, beta: float, schedule: Schedule, seed: int) -> Bottleneck:
    """Train a bottleneck; the seed decides everything.

    Args:
        states: (examples, width).
        answers: (examples,) int64 below `classes`.
        classes: how many answers there are.
        beta: what a nat of rate costs.
        schedule: of the training.
        seed: of the initial weights, the order of the examples and the codes drawn.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        bottleneck = Bottleneck(states.shape[1], classes)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(bottleneck.parameters(), lr=schedule.learning_rate)
    steps = schedule.epochs * math.ceil(len(states) / schedule.batch)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    for _ in range(schedule.epochs):
        for rows in torch.randperm(len(states), generator=generator).split(schedule.batch):
            mu, sigma = bottleneck.encode(states[rows])
            logits = bottleneck.decoder(draw_code(mu, sigma, generator))
            loss = cross_entropy(logits, answers[rows]) + beta * code_rate(mu, sigma).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            decay.step()
    return bottleneck


@torch.inference_mode()
def score(bottleneck: Bottleneck, states: Tensor, answers: Tensor, *, seed: int) -> dict[str, Tensor]:
    """`rate`, `distortion` and `information` of each example, (examples,), the latter two the means of some draws."""
    generator = torch.Generator().manual_seed(seed)
    mu, sigma = bottleneck.encode(states)
    distortion, information = torch.zeros(len(states)), torch.zeros(len(states), dtype=torch.float64)
    for _ in range(DRAWS):
        z = draw_code(mu, sigma, generator)
        distortion += cross_entropy(bottleneck.decoder(z), answers, reduction="none") / DRAWS
        information += code_information(z, mu, sigma) / DRAWS
    return {"rate": code_rate(mu, sigma), "distortion": distortion, "information": information}


@torch.inference_mode()
def final_states(
    model: PreTrainedModel, examples: Sequence[Example], *, tokens_per_batch: int = 16_384
) -> dict[str, Tensor]:
    """What the head reads at the last meta-token of each prompt (`meta`) and at the text token before it (`text`).

    Args:
        model: is put into evaluation mode.
        examples: their prompts are read, in batches of similar length.
        tokens_per_batch: padded tokens of a batch.

    Returns:
        Each (examples, width) float32, on the CPU.

    Raises:
        UserError: if a prompt has no meta-token with text before it, or is longer than the model's learned positions.
    """
    model.eval()
    prompts = [Prompt.of(example, model.config.meta_token_id) for example in examples]
    places = torch.tensor([(prompt.text_before(prompt.metas[-1]), prompt.metas[-1]) for prompt in prompts])
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].ids))
    decoder, _ = decoder_of(model)
    parts = []
    batch = max(1, tokens_per_batch // max(len(prompt.ids) for prompt in prompts))
    for start in range(0, len(order), batch):
        rows = order[start : start + batch]
        # Padding is on the right, where causal attention never looks, so no mask is needed.
        ids = pad_sequence([prompts[row].ids for row in rows], batch_first=True)
        hidden = decoder(input_ids=ids.to(model.device), use_cache=False).last_hidden_state.float().cpu()
        parts.append(hidden[torch.arange(len(rows))[:, None], places[rows]])
    states = torch.cat(parts)[torch.tensor(order).argsort()]
    return {"text": states[:, 0], "meta": states[:, 1]}


def rate_distortion(
    model: PreTrainedModel,
    examples: Sequence[Example],
    about: About,
    *,
    held_out: int = 500,
    fits: int = 3,
    intervention: Intervention | None = None,
) -> list[Measurement]:
    """Points of the rate-distortion curves at the last meta-token and at the last text token (`subject`).

    For each beta and seed of a fit, means over examples of `rate`, `distortion` and `information`:

    - as in the paper, trained and scored on the same first 50 examples, 5 passes one by one (`split` fit);
    - trained on all but the last `held_out` examples, scored on these (train) and on the others (held_out).

    And once for each split `answer_entropy`, the distortion at rate 0 of who knows how frequent each answer is.

    Args:
        model: is put into evaluation mode and stays as it is.
        examples: their prompts and the first tokens of their answers are read.
        about: fields of the records.
        held_out: how many examples are kept for scoring.
        fits: how many bottlenecks are trained for each beta, with seeds from 0.
        intervention: in force while the states are computed.

    Raises:
        UserError: if there are too few examples, a prompt has no meta-token with text before it, or the model cannot
            be run on it.
    """
    if held_out < 1 or len(examples) - held_out < PAPER_EXAMPLES:
        raise UserError(
            f"{len(examples)} examples, {held_out} of them held out, do not suffice: {PAPER_EXAMPLES} at least are "
            "trained on and 1 at least is held out."
        )
    with intervene(model, intervention):
        places = final_states(model, examples)
    first_ids = torch.tensor([example.input_ids[example.answer_start] for example in examples])
    answers = first_ids.unique(return_inverse=True)[1]
    classes = int(answers.max()) + 1
    few, most = slice(PAPER_EXAMPLES), slice(len(examples) - held_out)
    parts: dict[Part, slice] = {"fit": few, "train": most, "held_out": slice(most.stop, None)}
    common: dict[str, Any] = {
        "analysis": "rate_distortion",
        "position_embedding": model.config.position_embedding,
        "intervention": None if intervention is None else str(intervention),
        "marker": "final",
        **about,
    }
    measured = [
        Measurement(
            **common,
            metric="answer_entropy",
            split=split,
            value=unigram_entropy(answers[part].numpy()),
            n=len(answers[part]),
        )
        for split, part in parts.items()
    ]
    plan: list[tuple[slice, Schedule, tuple[Part, ...]]] = [
        (few, PAPER_SCHEDULE, ("fit",)),
        (most, SCHEDULE, ("train", "held_out")),
    ]
    for trained, schedule, splits in plan:
        for (subject, states), beta, seed in product(places.items(), BETAS, range(fits)):
            spread, mean = torch.std_mean(states[trained], dim=0)
            scaled = (states - mean) / spread.clamp(min=1e-6)
            bottleneck = fit(
                scaled[trained], answers[trained], classes=classes, beta=beta, schedule=schedule, seed=seed
            )
            for split in splits:
                scores = score(bottleneck, scaled[parts[split]], answers[parts[split]], seed=seed)
                where: dict[str, Any] = {"subject": subject, "beta": beta, "fit_seed": seed, "split": split}
                for metric, values in scores.items():
                    where["metric"] = metric
                    measured.append(Measurement(**common, **where, **summary(list(values[:, None].numpy()))))
    return measured
