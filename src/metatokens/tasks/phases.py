"""The sizes of prompts: the five phases of the paper's curriculum (Table 6), and the phase of a prompt length."""

from dataclasses import dataclass, replace

from numpy.random import Generator


@dataclass(frozen=True)
class Sizes:
    """How many lists a prompt has, and how many items each list has."""

    lists: tuple[int, int]
    """The range of m, both ends included."""
    lengths: tuple[tuple[int, int], ...]
    """Ranges of n, both ends included; each is drawn equally often."""
    asked: tuple[int, int] | None = None
    """The range of how much the question is about: items of the target list, at most so many bits before the
    marker (parity), or words between the markers (copying); default: n."""

    def draw(self, generator: Generator) -> tuple[int, int, int]:
        """Draw m, n, and how much of n the question is about."""
        n_range = self.lengths[generator.integers(len(self.lengths))]
        m = _draw_from(generator, self.lists)
        n = _draw_from(generator, n_range)
        asked = n if self.asked is None else min(n, _draw_from(generator, self.asked))
        return m, n, asked


def _draw_from(generator: Generator, ends: tuple[int, int]) -> int:
    return int(generator.integers(*ends, endpoint=True))


PHASES = {
    1: Sizes((3, 8), ((3, 10),)),
    2: Sizes((8, 12), ((3, 8), (9, 16))),
    3: Sizes((12, 19), ((3, 8), (9, 16), (17, 25))),
    4: Sizes((15, 20), ((40, 60),)),
    5: Sizes((15, 20), ((90, 110),)),
}
FACTS = Sizes((8, 16), ((1, 1),))  # of the conditions `facts_K`, whatever the phase
# In parity the marked bits decide the split: with 10 at most, as in the paper, few sequences would be left to test.
_PARITY_PHASES = PHASES | {1: Sizes((3, 8), ((3, 16),))}

_LENGTHS = (128, 256, 512, 1024, 2048)  # of prompts, in tokens, in phases 1 to 5


def phase_of_length(length: int) -> int:
    """The hardest phase at a prompt length in tokens: that of the next listed length, 5 beyond 2,048."""
    shorter = sum(listed < length for listed in _LENGTHS)
    return min(shorter + 1, max(PHASES))


def sizes_of(task: str, phase: int, length: int = 0) -> Sizes:
    """A phase's sizes in a task; for a prompt length of T >= 4,096 tokens, lists are floor(T / 2,048) times as long."""
    phases = _PARITY_PHASES if task == "parity" else PHASES
    times = max(1, length // max(_LENGTHS))
    sizes = phases[phase]
    return replace(sizes, lengths=tuple((low * times, high * times) for low, high in sizes.lengths))
