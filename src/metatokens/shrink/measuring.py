"""What a model finds in a text, by the form of the look-up and its length; how it predicts prose and replies."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from metatokens.data.insertion import IGNORED_LABEL
from metatokens.data.landmarks import Landmarks, with_landmarks
from metatokens.decoder import measure_cache_share
from metatokens.errors import UserError
from metatokens.evaluation.intervals import clustered_interval, normal_interval
from metatokens.evaluation.perplexity import token_losses
from metatokens.records import Result, pack_hits
from metatokens.shrink.answering import answer_logits, is_answered
from metatokens.shrink.lookups import CHAT, KINDS, PASSAGE, TRAINED, Asked, Form, Lookups
from metatokens.shrink.sizes import ROOM_FOR_QUESTION
from metatokens.tasks.example import Encoded

# Each text states so many facts, all of one form. So whoever names any stated value is right in a sixth of the cases.
FACTS = 6
ASKED_IN_CHAT = "question"  # the kind whose forms are asked about in a chat
SEED = 2026  # of all tests
# The models that are measured.
BASE, SHRUNK = "full cache, as it was", "shrunk"
TRAINED_FULL, TRAINED_WINDOW = "full cache, trained alike", "a window alone, trained alike"
EXCERPT, REPLY = "excerpt", "reply"  # what a perplexity is of


@dataclass(frozen=True)
class Tests:
    """What every model is measured on.

    Attributes:
        asked: texts with questions, by length; None: a user's own.
        excerpts: held-out prose, (tokens,) each.
    """

    asked: Mapping[int | None, Sequence[Asked]]
    excerpts: Sequence[Sequence[int]]

    @property
    def number_of_results(self) -> int:
        """How many results a model has: one for each length and kind of look-ups, and for each excerpt."""
        number = len(self.excerpts)
        for texts in self.asked.values():
            number += len({question.kind for asked in texts for question in asked.questions})
        return number


def draw_tests(
    lookups: Lookups,
    trained: Sequence[Form],
    texts: Mapping[int, int],
    *,
    distance: Mapping[int, int],
    user_questions: Sequence[Asked],
    excerpts: int,
    excerpt_length: int,
) -> Tests:
    """Draw the tests.

    Args:
        lookups: of the test split and its forms.
        trained: forms that are trained; one of each kind is tested.
        texts: by length, the number of texts of each kind, rounded up to a multiple of its forms. The facts of a text
            have one form.
        distance: by length, tokens between each fact and the end of the text at least.
        user_questions: a user's held-out questions.
        excerpts: of prose.
        excerpt_length: tokens.

    Raises:
        UserError: if a text has no room for all facts.
    """
    groups = _by_kind(lookups.forms)
    generator = np.random.default_rng(SEED)
    groups[TRAINED] = [
        # So the questions are of this kind too.
        forms[generator.integers(len(forms))].model_copy(update={"kind": TRAINED})
        for forms in _by_kind(trained).values()
    ]
    if lookups.turns is not None:
        groups[CHAT] = groups[ASKED_IN_CHAT]
    asked: dict[int | None, list[Asked]] = {None: list(user_questions)} if user_questions else {}
    for length, count in texts.items():
        asked[length] = []
        for group, (kind, forms) in enumerate(groups.items()):
            # Each form has as many texts as any other, at each length.
            number_of_texts = math.ceil(count / len(forms)) * len(forms)
            for number in range(number_of_texts):
                drawn = lookups.draw(
                    np.random.default_rng([SEED, length, group, number]),
                    length=length - ROOM_FOR_QUESTION,
                    distance=distance[length],
                    forms=[forms[number % len(forms)]],
                    facts=FACTS,
                    chat=kind == CHAT,
                    passage=kind == KINDS[0],
                    keeps_distance=True,
                )
                number_of_facts = sum(question.kind != PASSAGE for question in drawn.questions)
                if number_of_facts < FACTS:
                    others = {other: texts[other] for other in texts if other != length}
                    raise UserError(
                        f"a test of {length:,} tokens has no room for {FACTS} facts of the kind {kind!r}, in this "
                        f"text: leave that length out, by --set 'tests.texts={others}'."
                    )
                asked[length].append(drawn)
    beginning = lookups.beginning
    prose = lookups.prose.excerpts(excerpts, excerpt_length - len(beginning))
    return Tests(asked, [[*beginning, *excerpt] for excerpt in prose])


def _by_kind(forms: Sequence[Form]) -> dict[str, list[Form]]:
    return {kind: [form for form in forms if form.kind == kind] for kind in KINDS}


@dataclass(frozen=True)
class Measuring:
    """Measures one model.

    Attributes:
        model: in evaluation mode.
        name: of the model, for the results.
        seed: of its training.
        landmarks: where meta-tokens are inserted, if anywhere.
    """

    model: Any
    name: str
    seed: int
    landmarks: Landmarks | None

    def results(self, tests: Tests, replies: Sequence[Encoded]) -> Iterator[Result]:
        """The share of look-ups that are answered exactly, by length and kind; then perplexities.

        They are those of the second half of each excerpt, and of each reply of the base about held-out texts.
        """
        for length, texts in tests.asked.items():
            yield from self._lookups(length, texts)
        for number, excerpt in enumerate(tests.excerpts):
            yield self._perplexity(f"{EXCERPT} {number}", excerpt, len(excerpt) // 2)
        for number, reply in enumerate(replies):
            yield self._perplexity(f"{REPLY} {number}", list(reply.input_ids), reply.answer_start)

    def _lookups(self, length: int | None, texts: Sequence[Asked]) -> Iterator[Result]:
        hits: defaultdict[str, list[list[bool]]] = defaultdict(list)  # by kind, of each text
        rows = []
        for asked in texts:
            rows.append(with_landmarks(self.landmarks, asked.text))
            of_questions = answer_logits(self.model, asked.text, asked.questions, self.landmarks)
            of_text: defaultdict[str, list[bool]] = defaultdict(list)
            for question, logits in zip(asked.questions, of_questions, strict=True):
                of_text[question.kind].append(is_answered(logits, question))
            for kind, of_kind in of_text.items():
                hits[kind].append(of_kind)
        share = measure_cache_share(self.model, rows)
        for kind, of_texts in hits.items():
            answered = np.concatenate(of_texts)
            low, high = clustered_interval(of_texts)
            yield Result(
                model=self.name,
                seed=self.seed,
                task=kind,
                length=length,
                metric="exact_match",
                value=float(answered.mean()),
                n=len(answered),
                low=low,
                high=high,
                hits=pack_hits(answered.tolist()),
                **share,
            )

    def _perplexity(self, name: str, text: Sequence[int], start: int) -> Result:
        """The perplexity of a text's tokens from `start` on."""
        ids = torch.tensor(with_landmarks(self.landmarks, text), device=self.model.device)
        is_text = ids != self.model.config.meta_token_id
        is_scored = is_text & (is_text.cumsum(dim=0) > start)
        labels = ids.masked_fill(~is_scored, IGNORED_LABEL)
        losses = token_losses(self.model, ids[None], labels[None])
        mean = losses.mean().item()
        low, high = normal_interval(mean, losses.std().item() / math.sqrt(len(losses)))
        return Result(
            model=self.name,
            seed=self.seed,
            text=name,
            length=len(text),
            metric="perplexity",
            value=math.exp(mean),
            low=math.exp(low),
            high=math.exp(high),
            n=len(losses),
            **measure_cache_share(self.model, [ids.tolist()]),
        )
