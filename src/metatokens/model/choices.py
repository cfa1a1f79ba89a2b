"""The choices of a model's settings, which configurations and recipes share."""

from typing import Literal

PositionEmbedding = Literal["learned", "rope", "none"]
SecondAttention = Literal["meta", "causal", "none"]
AttentionScale = Literal["constant", "log_length"]
