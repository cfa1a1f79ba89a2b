"""What a model is trained on: prose, look-ups of all forms and lengths, its own replies, and a user's questions."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import numpy as np
from torch import Tensor

from metatokens.data.collating import labelled_batch
from metatokens.data.landmarks import Landmarks
from metatokens.shrink.lookups import Asked, Lookups
from metatokens.tasks.example import Encoded

ROOM_PER_FACT = 25  # tokens of the part of a text where facts are
ROOM_IN_CHAT = 2 * ROOM_PER_FACT  # tokens at least where facts are, or there is no chat
MOST_FACTS = 24  # in a text
MOST_FORMS = 4  # of the facts of a text: so several facts have one form, and only their names tell them apart
CHAT_SHARE = 0.25  # of the texts with look-ups, if the model has a chat template
REPLY_SHARE = 0.2  # of the steps without prose, if there are replies
USER_SHARE = 0.25  # of the other steps, if the user gives questions

Row = tuple[list[int], list[int]]  # the ids of a text, and the indices of those that count


@dataclass(frozen=True)
class Mixture:
    """The batches of a training, one an index: `input_ids` and `labels`, (rows, length) each.

    A batch is prose, in which every token counts; or texts with look-ups, in which the answers count; or a chat, in
    which the model's own replies do; or records of the user, in which the completions do. Texts with look-ups have one
    length in a batch. Batches have about equally many tokens.

    Attributes:
        lookups: of the training split.
        steps: batches.
        tokens: of a batch.
        lengths: tokens of texts with look-ups, one drawn for a batch; prose has the first.
        distance: the fewest tokens from a fact to the end of its text.
        prose_share: of the batches.
        seed: of all draws.
        replies: of the model itself, to requests in a chat.
        user_records: the user's own questions.
        landmarks: where meta-tokens are inserted, if anywhere.
    """

    lookups: Lookups
    steps: int
    tokens: int
    lengths: Sequence[int]
    distance: int
    prose_share: float
    seed: int
    replies: Sequence[Encoded] = ()
    user_records: Sequence[Encoded] = ()
    landmarks: Landmarks | None = None

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> dict[str, Tensor]:
        generator = np.random.default_rng([self.seed, step])
        # Evenly spread, so that every stretch of the training has both kinds.
        is_prose = int((step + 1) * self.prose_share) > int(step * self.prose_share)
        if is_prose:
            rows = [self._prose_row(generator) for _ in range(self._rows(self.lengths[0]))]
        elif self.replies and generator.random() < REPLY_SHARE:
            rows = self._record_rows(generator, self.replies)
        elif self.user_records and generator.random() < USER_SHARE:
            rows = self._record_rows(generator, self.user_records)
        else:
            length = self.lengths[int(generator.integers(len(self.lengths)))]
            rows = [self._lookup_row(generator, length) for _ in range(self._rows(length))]
        return labelled_batch([self._with_landmarks(ids, scored) for ids, scored in rows])

    def _rows(self, length: int) -> int:
        return max(1, self.tokens // length)

    def _prose_row(self, generator: np.random.Generator) -> Row:
        beginning, length = self.lookups.beginning, self.lengths[0]
        excerpt = self.lookups.prose.excerpt(generator, length - len(beginning))
        return [*beginning, *excerpt], list(range(1, length))

    def _record_rows(self, generator: np.random.Generator, records: Sequence[Encoded]) -> list[Row]:
        """A random record and those next to it by length, whose answers are at about the same places.

        So a batch has little padding, and few columns in which logits are computed. After the longest record comes the
        shortest.
        """
        by_length = sorted(records, key=lambda record: len(record.input_ids))
        number = int(generator.integers(len(records)))
        rows: list[Row] = []
        longest = 0
        for record in islice(cycle(by_length), number, None):
            longest = max(longest, len(record.input_ids))
            if rows and (len(rows) + 1) * longest > self.tokens:
                break
            ids = list(record.input_ids)
            rows.append((ids, list(range(record.answer_start, len(ids)))))
        return rows

    def _lookup_row(self, generator: np.random.Generator, length: int) -> Row:
        turns = self.lookups.turns
        is_chat = turns is not None and generator.random() < CHAT_SHARE
        room = length - self.distance
        if turns is not None and len(turns.opening) > room - ROOM_IN_CHAT:
            is_chat = False  # its system prompt would leave no room for facts
        most_facts = min(MOST_FACTS, room // ROOM_PER_FACT)
        facts = int(generator.integers(2, max(3, most_facts + 1)))
        number_of_forms = int(generator.integers(1, MOST_FORMS + 1))
        asked = self.lookups.draw(
            generator,
            length=length,
            distance=self.distance,
            forms=self.lookups.some_forms(generator, number_of_forms),
            facts=facts,
            chat=is_chat,
            passage=not is_chat,  # which would go on within the user's message
        )
        return scored_row(asked)

    def _with_landmarks(self, ids: list[int], scored: list[int]) -> Row:
        if self.landmarks is None:
            return ids, scored
        with_metas = np.array(self.landmarks.insert_into(ids))
        text_positions = np.flatnonzero(with_metas != self.landmarks.meta_token_id)
        return with_metas.tolist(), text_positions[scored].tolist()


def scored_row(asked: Asked) -> Row:
    """A text with its questions and answers one after another: the ids, and the indices of those of the answers."""
    ids: list[int] = list(asked.text)
    scored: list[int] = []
    closing: tuple[int, ...] = ()
    for question in asked.questions:
        ids += [*closing, *question.ids]
        scored += range(len(ids), len(ids) + len(question.answer))
        ids += question.answer
        closing = question.closing
    return ids, scored
