"""Every member of the family, and a Llama of the same size as a control, under the model tests of transformers."""

from dataclasses import dataclass
from typing import Any
from unittest import TestCase

import torch
from transformers import (
    AutoModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)
from transformers_tests.generation.test_utils import GenerationTesterMixin
from transformers_tests.test_configuration_common import ConfigTester
from transformers_tests.test_modeling_common import ModelTesterMixin, ids_tensor
from transformers_tests.test_training_mixin import TrainingTesterMixin

from metatokens.model.configuration import MetaGPT2Config
from metatokens.model.modeling import MetaGPT2ForCausalLM, MetaGPT2Model

# Which neither the training test learns to continue nor a cut of the vocabulary leaves out.
META = 0
SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 512,
    "pad_token_id": 3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# The suite tells models with a head from those without by names that transformers lists.
MODEL_MAPPING_NAMES[MetaGPT2Config.model_type] = MetaGPT2Model.__name__
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[MetaGPT2Config.model_type] = MetaGPT2ForCausalLM.__name__
AutoModel.register(MetaGPT2Config, MetaGPT2Model, exist_ok=True)


@dataclass
class Member:
    """What the suite calls a model tester: a tiny configuration and inputs for it."""

    config_class: type[PreTrainedConfig]
    base_model_class: type[PreTrainedModel]
    causal_lm_class: type[PreTrainedModel]
    choices: dict[str, str | int | bool]
    batch_size: int = 13
    seq_length: int = 7
    is_training: bool = True

    def __getattr__(self, name: str) -> int:
        """A size; the suite asks for several by name."""
        try:
            return SIZES[name]
        except KeyError:
            raise AttributeError(name) from None

    def get_config(self) -> PreTrainedConfig:
        """A new configuration."""
        return self.config_class(**SIZES, **self.choices)

    def prepare_config_and_inputs_for_common(
        self,
    ) -> tuple[PreTrainedConfig, dict[str, torch.Tensor]]:
        """Rows of several lengths, padded on the right, with meta-tokens in most."""
        ids = ids_tensor((self.batch_size, self.seq_length), self.vocab_size)
        ids[::2, 1::3] = META
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids).tril()}


def suite_of(member: Member) -> type[TestCase]:
    """The suite's tests of one model."""

    class ModelTest(ModelTesterMixin, GenerationTesterMixin, TrainingTesterMixin, TestCase):
        all_model_classes = (member.base_model_class, member.causal_lm_class)
        test_can_init_all_missing_weights_before_2023 = True
        model_tester = member

        def _prepare_for_class(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
            """As the suite's, whose labels are all zeros, with labels that are not the meta-token: none is learned."""
            inputs = super()._prepare_for_class(*args, **kwargs)
            return inputs | ({"labels": inputs["labels"] + 1} if "labels" in inputs else {})

        def test_config(self) -> None:
            ConfigTester(
                self, config_class=member.config_class, **SIZES, **member.choices
            ).run_common_tests()

    return ModelTest


for second in ("meta", "causal", "none"):
    for positions in ("learned", "rope", "none"):
        choices = {
            "second_attention": second,
            "position_embedding": positions,
            "meta_token_id": META,
        }
        member = Member(MetaGPT2Config, MetaGPT2Model, MetaGPT2ForCausalLM, choices)
        globals()[f"{second}_{positions}"] = suite_of(member)
llama = suite_of(Member(LlamaConfig, LlamaModel, LlamaForCausalLM, {"tie_word_embeddings": True}))
