"""Parity: the XOR of the bits before the first meta-token of a bit string (paper, appendix "Example Prompts").

prompt    Bits: 0 _PAUSE_ 1 0 0
          Q: What is the XOR of all bits before this pause? _PAUSE_
answer    0
"""

import re
from collections.abc import Sequence

from numpy.random import Generator

from metatokens.recipe import Split
from metatokens.tasks.content import Content, split_of
from metatokens.tasks.shortcuts import MARK, ParsedPrompt, Rule, Table

QUESTION = "Q: What is the XOR of all bits before this pause?"
LANDMARK_QUESTION = "Q: What is the XOR of the first {marked} bits?"
QUESTIONS = [QUESTION, *(LANDMARK_QUESTION.format(marked=marked) for marked in range(1, 26))]
CHANCE = 0.5
_FEWEST = 6  # bits; all shorter sequences are for training, since there are so few of them


def draw(generator: Generator, m: int, n: int, asked: int, split: Split) -> Content | None:
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


# --- shortcuts


def rules(condition: str) -> dict[str, Rule]:
    """Answers that leave out bits, or take too many."""
    named: dict[str, Rule] = {
        "the last bit that is asked about": lambda prompt: _marked_bits(prompt)[-1],
        "the opposite of the last bit that is asked about": lambda prompt: _xor(
            [_marked_bits(prompt)[-1], "1"]
        ),
        "the XOR of all bits": lambda prompt: _xor(_bits(prompt)),
    }
    if condition == "landmark":  # elsewhere this would do the task
        named["the XOR of the bits before the first marker"] = lambda prompt: _xor(
            _bits_before_first_mark(prompt)
        )
    return named


def _bits(prompt: ParsedPrompt) -> list[str]:
    return prompt.lines[0][1:]


def _bits_before_first_mark(prompt: ParsedPrompt) -> list[str]:
    return prompt.text.partition(MARK)[0].split()[1:]


def _marked_bits(prompt: ParsedPrompt) -> tuple[str, ...]:
    count = re.search(r"the first (\d+) bits", prompt.question)
    return tuple(_bits(prompt)[: int(count[1])] if count else _bits_before_first_mark(prompt))


def _xor(bits: Sequence[str]) -> int:
    return bits.count("1") % 2


TABLES: dict[str, Table] = {"a table of the bits that are asked about": _marked_bits}
