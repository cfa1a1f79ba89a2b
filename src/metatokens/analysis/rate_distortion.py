"""How well a compressed state predicts the answer, by rate in nats (paper, section 5, Figure 3, Theorem 5.1).

A variational information bottleneck (Alemi et al., 2017) on a frozen model: a code z is drawn from
N(mu(h), diag(sigma(h)^2)), where h is the final state at one position, and a linear softmax predicts the answer from z.
The loss is distortion + beta * rate, both in nats: the distortion is the cross-entropy -ln q(y | z), and the rate is
KL(q(z | h) || N(0, I)), an upper bound of the information I(h; z).

Theorem 5.1 compares models with and without meta-tokens, Figure 3 two positions of one model. `rate_distortion`
measures both positions, the last meta-token and the last text token of the prompt, of any model. The theorem would
follow if one model contained the other, which trained models do not. For the examples that a code is scored on,
distortion >= H(y) - rate does hold, where H(y) is the entropy of their answers.

The paper does not specify mu and sigma (here linear, with softplus for sigma), the size of z (32) or the learning rate.
h is the state that the head reads, after the last LayerNorm, with each feature scaled to mean 0 and variance 1 over the
training examples. y is the answer's first token, one of those that occur.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from scipy.stats import entropy
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softplus
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from metatokens.analysis.observation import PromptIds
from metatokens.analysis.samples import summary
from metatokens.decoder import decoder_of
from metatokens.errors import UserError
from metatokens.model.interventions import Intervention, intervene
from metatokens.model.wrappers import takes_wrapped
from metatokens.records import About, AnalysisSplit, Measurement
from metatokens.tasks.example import Example
from metatokens.tasks.scoring import by_length

BETAS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # the paper's
CODE_SIZE = 32
DRAWS = 4  # of z for each example when a code is scored
TOKENS_A_BATCH = 16_384  # padded


@dataclass(frozen=True)
class Schedule:
    """Settings of a bottleneck's training with Adam."""

    batch: int  # examples per step
    epochs: int
    learning_rate: float  # falls linearly to 0


PAPER_EXAMPLES = 50
# Adam's usual 1e-3 gives less than guessing.
PAPER_SCHEDULE = Schedule(batch=1, epochs=5, learning_rate=1e-2)
# Four times as many epochs gain a few per cent.
SCHEDULE = Schedule(batch=250, epochs=100, learning_rate=3e-2)


class Bottleneck(nn.Module):
    """Encoder and decoder of a code of `CODE_SIZE` numbers."""

    def __init__(self, width: int, answers: int):
        super().__init__()
        self.encoder = nn.Linear(width, 2 * CODE_SIZE)
        self.decoder = nn.Linear(CODE_SIZE, answers)

    def encode(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """mu and sigma of the codes, each (examples, code size), for states (examples, width)."""
        mu, raw = self.encoder(states).chunk(2, dim=-1)
        return mu, softplus(raw)


def draw_code(mu: Tensor, sigma: Tensor, generator: torch.Generator) -> Tensor:
    """Draw z ~ N(mu, diag(sigma^2)), differentiable in both."""
    return mu + sigma * torch.randn(mu.shape, generator=generator, dtype=mu.dtype)


def code_rate(mu: Tensor, sigma: Tensor) -> Tensor:
    """KL(N(mu, diag(sigma^2)) || N(0, I)) in nats, (examples, code size) -> (examples,)."""
    return (mu**2 + sigma**2 - 1 - 2 * sigma.log()).sum(dim=-1) / 2


def fit(
    states: Tensor, answers: Tensor, *, classes: int, beta: float, schedule: Schedule, seed: int
) -> Bottleneck:
    """Train a bottleneck.

    Args:
        states: (examples, width).
        answers: (examples,) int64 below `classes`.
        classes: the number of possible answers.
        beta: the weight of the rate.
        schedule: the settings.
        seed: of the initial weights, the order of the examples and the codes.
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
def score(
    bottleneck: Bottleneck, states: Tensor, answers: Tensor, *, seed: int
) -> dict[str, Tensor]:
    """`rate` and `distortion` of each example, (examples,), the latter a mean over draws."""
    generator = torch.Generator().manual_seed(seed)
    mu, sigma = bottleneck.encode(states)
    distortion = torch.zeros(len(states))
    for _ in range(DRAWS):
        z = draw_code(mu, sigma, generator)
        distortion += cross_entropy(bottleneck.decoder(z), answers, reduction="none") / DRAWS
    return {"rate": code_rate(mu, sigma), "distortion": distortion}


@torch.inference_mode()
def final_states(model: PreTrainedModel, examples: Sequence[Example]) -> dict[str, Tensor]:
    """The head's inputs at the last meta-token of each prompt (`meta`) and at the text token before it (`text`).

    Each is (examples, width) float32, on the CPU. The model is put into evaluation mode.
    """
    model.eval()
    prompts = [PromptIds.of(example, model.config.meta_token_id) for example in examples]
    read = torch.tensor(
        [(prompt.text_before(prompt.metas[-1]), prompt.metas[-1]) for prompt in prompts]
    )
    lengths = [len(prompt.ids) for prompt in prompts]
    decoder, _ = decoder_of(model)
    states_of_batches: list[Tensor] = []
    order: list[int] = []
    for rows in by_length(lengths, max(1, TOKENS_A_BATCH // max(lengths))):
        # Padding is on the right, which causal attention never sees, so no mask is needed.
        ids = pad_sequence([prompts[row].ids for row in rows], batch_first=True)
        hidden = (
            decoder(input_ids=ids.to(model.device), use_cache=False).last_hidden_state.float().cpu()
        )
        states_of_batches.append(hidden[torch.arange(len(rows))[:, None], read[rows]])
        order += rows
    states = torch.cat(states_of_batches)[torch.tensor(order).argsort()]
    return {"text": states[:, 0], "meta": states[:, 1]}


@takes_wrapped
def rate_distortion(
    model: PreTrainedModel,
    examples: Sequence[Example],
    shared: About,
    *,
    held_out: int = 500,
    fits: int = 3,
    intervention: Intervention | None = None,
) -> list[Measurement]:
    """Points of the rate-distortion curves at the last meta-token and at the last text token (`subject`).

    For each beta and seed, means over examples of `rate` and `distortion`:

    - as in the paper, trained and scored on the same first 50 examples, in 5 epochs with batches of 1 (`split`: "fit");
    - trained on all except the last `held_out` examples, and scored on both parts ("train" and "held_out").

    And for each split `answer_entropy`, the distortion at rate 0 if the frequency of each answer is known.

    Args:
        model: is put into evaluation mode, and not changed.
        examples: their prompts and the first tokens of their answers are read.
        shared: the fields that all records share.
        held_out: the number of examples kept for scoring.
        fits: the number of bottlenecks trained for each beta, with seeds from 0.
        intervention: applied while the states are computed.

    Raises:
        UserError: if there are too few examples, or a prompt has no meta-token after some text.
    """
    if held_out < 1 or len(examples) - held_out < PAPER_EXAMPLES:
        raise UserError(
            f"{len(examples)} examples with {held_out} held out are too few: training needs {PAPER_EXAMPLES} and the "
            "held-out part 1."
        )
    with intervene(model, intervention):
        states_by_subject = final_states(model, examples)
    first_ids = torch.tensor([example.input_ids[example.answer_start] for example in examples])
    _, answers = first_ids.unique(return_inverse=True)  # numbers of those that occur
    n_train = len(examples) - held_out
    paper_rows: dict[AnalysisSplit, slice] = {"fit": slice(PAPER_EXAMPLES)}
    other_rows: dict[AnalysisSplit, slice] = {
        "train": slice(n_train),
        "held_out": slice(n_train, None),
    }
    common = shared.present_fields(
        analysis="rate_distortion",
        position_embedding=model.config.position_embedding,
        intervention=None if intervention is None else str(intervention),
        marker="final",
    )
    measured: list[Measurement] = []
    for split, rows in (paper_rows | other_rows).items():
        frequencies = answers[rows].bincount()
        nats = float(entropy(frequencies))
        n = int(frequencies.sum())
        measured.append(
            Measurement(**common, metric="answer_entropy", split=split, value=nats, n=n)
        )
    for schedule, scored in ((PAPER_SCHEDULE, paper_rows), (SCHEDULE, other_rows)):
        for subject, states in states_by_subject.items():
            for point in _points(schedule, states, answers, scored, fits):
                measured.append(Measurement(**common, **point | {"subject": subject}))
    return measured


def _points(
    schedule: Schedule,
    states: Tensor,
    answers: Tensor,
    scored: Mapping[AnalysisSplit, slice],
    fits: int,
) -> Iterator[dict[str, Any]]:
    """Train codes on the first of the scored parts, for each beta and seed: the fields of each measurement."""
    train_rows = next(iter(scored.values()))
    # Each feature has mean 0 and variance 1 over the training examples.
    spread, mean = torch.std_mean(states[train_rows], dim=0)
    scaled = (states - mean) / spread.clamp(min=1e-6)
    classes = int(answers.max()) + 1
    for beta, seed in product(BETAS, range(fits)):
        bottleneck = fit(
            scaled[train_rows],
            answers[train_rows],
            classes=classes,
            beta=beta,
            schedule=schedule,
            seed=seed,
        )
        for split, rows in scored.items():
            for metric, values in score(bottleneck, scaled[rows], answers[rows], seed=seed).items():
                of_examples = list(values[:, None].numpy())
                yield {
                    "metric": metric,
                    "split": split,
                    "beta": beta,
                    "fit_seed": seed,
                    **summary(of_examples),
                }
