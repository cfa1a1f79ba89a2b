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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

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
from metatokens.model.wrappers import takes_wrapped
from metatokens.records import About, AnalysisSplit, Measurement
from metatokens.tasks.example import Example
from metatokens.tasks.scoring import batches_by_length

BETAS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # the paper's
CODE_SIZE = 32
FITS = 3  # bottlenecks for each beta, with seeds from 0
DRAWS = 4  # of z for each example when a code is scored
TOKENS_A_BATCH = 16_384


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
    for rows in batches_by_length(lengths, TOKENS_A_BATCH):
        # Padding is on the right, which causal attention never sees, so no mask is needed.
        ids = pad_sequence([prompts[row].ids for row in rows], batch_first=True)
        hidden = (
            decoder(input_ids=ids.to(model.device), use_cache=False).last_hidden_state.float().cpu()
        )
        states_of_batches.append(hidden[torch.arange(len(rows))[:, None], read[rows]])
        order += rows
    states = torch.cat(states_of_batches)[torch.tensor(order).argsort()]
    return {"text": states[:, 0], "meta": states[:, 1]}


class _Part(NamedTuple):
    """Which examples codes are trained and scored on."""

    split: AnalysisSplit
    schedule: Schedule
    trained: slice
    scored: slice


@takes_wrapped
def rate_distortion(
    model: PreTrainedModel,
    examples: Sequence[Example],
    shared: About,
) -> list[Measurement]:
    """Points of the rate-distortion curves at the last meta-token and at the last text token (`subject`).

    For each beta and seed, means over examples of `rate` and `distortion`:

    - as in the paper, trained and scored on the same first 50 examples, in 5 epochs with batches of 1 (`split`: "fit");
    - trained on four fifths of the examples, and scored on the others ("held_out").

    And for each split `answer_entropy`, the distortion at rate 0 if the frequency of each answer is known.

    Args:
        model: is put into evaluation mode, and not changed.
        examples: their prompts and the first tokens of their answers are read.
        shared: the fields that all records share.

    Raises:
        UserError: if there are too few examples, or a prompt has no meta-token after some text.
    """
    n_train = len(examples) - len(examples) // 5
    if n_train < PAPER_EXAMPLES:
        raise UserError(
            f"{len(examples)} examples are too few: training on four fifths of them needs {PAPER_EXAMPLES}."
        )
    states_by_subject = final_states(model, examples)
    first_ids = torch.tensor([example.input_ids[example.answer_start] for example in examples])
    _, answers = first_ids.unique(return_inverse=True)  # numbers of those that occur
    parts = (
        _Part("fit", PAPER_SCHEDULE, slice(PAPER_EXAMPLES), slice(PAPER_EXAMPLES)),
        _Part("held_out", SCHEDULE, slice(n_train), slice(n_train, None)),
    )
    common = shared.present_fields(
        analysis="rate_distortion",
        position_embedding=model.config.position_embedding,
        marker="final",
    )
    measured: list[Measurement] = []
    for part in parts:
        frequencies = answers[part.scored].bincount()
        fields = common | {"split": part.split}
        nats, n = float(entropy(frequencies)), int(frequencies.sum())
        measured.append(Measurement(**fields, metric="answer_entropy", value=nats, n=n))
        for subject, states in states_by_subject.items():
            for point in _points(part, states, answers):
                measured.append(Measurement(**fields, **point | {"subject": subject}))
    return measured


def _points(part: _Part, states: Tensor, answers: Tensor) -> Iterator[dict[str, Any]]:
    """Train and score codes for each beta and seed: the fields of each measurement."""
    # Each feature has mean 0 and variance 1 over the training examples.
    spread, mean = torch.std_mean(states[part.trained], dim=0)
    scaled = (states - mean) / spread.clamp(min=1e-6)
    classes = int(answers.max()) + 1
    for beta, seed in product(BETAS, range(FITS)):
        bottleneck = fit(
            scaled[part.trained],
            answers[part.trained],
            classes=classes,
            beta=beta,
            schedule=part.schedule,
            seed=seed,
        )
        scores = score(bottleneck, scaled[part.scored], answers[part.scored], seed=seed)
        for metric, values in scores.items():
            of_examples = list(values[:, None].numpy())
            yield {"metric": metric, "beta": beta, "fit_seed": seed, **summary(of_examples)}
