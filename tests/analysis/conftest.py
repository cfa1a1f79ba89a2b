"""The tests of the analyses use the tiny models and the slow oracle of the model's tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "model"))
