"""Parity: the XOR of the bits before the first meta-token of a bit string (paper, appendix "Example Prompts").

prompt    Bits: 0 _PAUSE_ 1 0 0
          Q: What is the XOR of all bits before this pause? _PAUSE_
answer    0
"""

import numpy as np

from metatokens.recipe import Split
from metatokens.tasks.content import Content, split_of

QUESTION = "Q: What is the XOR of all bits before this pause?"
LANDMARK_QUESTION = "Q: What is the XOR of the first {marked} bits?"
QUESTIONS = [QUESTION, *(LANDMARK_QUESTION.format(marked=marked) for marked in range(1, 26))]
CHANCE = 0.5
_FEWEST = 6  # bits; all shorter sequences are for training, since there are so few of them


def draw(generator: np.random.Generator, m: int, n: int, asked: int, split: Split) -> Content | None:
    """Draw m n bits, with the meta-token after the first 1 to `asked` of them.

    The paper draws the marked length "phase-dependently" and refers to the list tasks' schedule, so m lists of n items
    become m n bits. Decoys are one to three further meta-tokens.

    Returns:
        None if the marked bits are in another split. The first and the last of them do not decide the split: otherwise
        one bit could tell a test sequence from the few training sequences like it, and give the answer away.
    """
    bits = generator.integers(2, size=m * n).tolist()
    marked = int(generator.integers(1, asked + 1))
    later = generator.permutation(m * n - marked)[: generator.integers(1, 4)]
    words = [f" {bit}" for bit in bits]
    split_of_bits = split_of("".join(words[1 : marked - 1])) if marked >= _FEWEST else "train"
    if split_of_bits != split:
        return None
    decoyed = (marked + 1, *sorted((later + marked + 2).tolist())) if len(later) else ()
    return Content(
        pieces=["Bits:", *words],
        markers=(marked + 1,),
        decoyed=decoyed,
        landmarks=tuple(range(n + 1, m * n + 2, n)),
        question=QUESTION,
        landmark_question=LANDMARK_QUESTION.format(marked=marked),
        answer=f" {sum(bits[:marked]) % 2}",
    )
