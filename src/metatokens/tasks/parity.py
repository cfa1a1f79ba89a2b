"""Parity: the XOR of the bits before the first meta-token of a bit string.

One example of phase 1 (paper, appendix "Example Prompts"); the completion is " 0":

    Bits: 0 _PAUSE_ 1 0 0
    Q: What is the XOR of all bits before this pause? _PAUSE_
"""

import numpy as np

from metatokens.tasks.example import Content

QUESTION = "Q: What is the XOR of all bits before this pause?"
QUESTIONS = [QUESTION]
CHANCE = 0.5


def draw(generator: np.random.Generator, m: int, n: int) -> Content:
    """Draw m * n bits, with the meta-token after the first 1 to n of them.

    The paper draws the marked length "phase-dependently" and refers to the list tasks' schedule, so m lists
    of n items become m * n bits. Decoys: one to three meta-tokens further on.
    """
    bits = generator.integers(2, size=m * n).tolist()
    marked = int(generator.integers(1, n + 1))
    later = generator.permutation(m * n - marked)[: generator.integers(1, 4)]
    return Content(
        pieces=["Bits:", *(" 1" if bit else " 0" for bit in bits)],
        markers=(marked + 1,),
        decoys=tuple((later + marked + 2).tolist()),
        question=QUESTION,
        answer=f" {sum(bits[:marked]) % 2}",
    )
