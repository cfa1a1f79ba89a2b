"""The choices of a model's settings, which configurations and recipes share.

A further second attention is a subclass of `MetaAttention`: examples/second_attention.py shows how.
"""

from typing import Literal

PositionEmbedding = Literal["learned", "rope", "none"]
SecondAttention = Literal["meta", "causal", "none"]
AttentionScale = Literal["constant", "log_length"]
