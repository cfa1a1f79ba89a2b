"""Names that the commands offer, here without loading torch."""

from typing import Literal

PresetName = Literal["smoke", "demo", "small", "more_text", "paper", "gpu"]
