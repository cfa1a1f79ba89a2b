"""A base in eight bits, by bitsandbytes, which the other tests go without."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.retrofit.test_libraries import test_a_base_in_eight_bits  # noqa: F401
