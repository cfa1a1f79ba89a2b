"""The baseline `gpt-neo`: transformers' own GPT-Neo (Black et al., 2021), used like this package's models.

The paper's second baseline (section 4.1) is the published EleutherAI/gpt-neo-125m. It has 2,048 learned positions, and
every second layer attends to the last 256 tokens alone. Layers, weights and the format on disk are transformers'. What
is added is what `finetune`, `evaluate` and `perplexity` ask of a model: a meta-token, which the tasks' markers need,
and states or a loss at some positions alone, without the logits of all others.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, GPTNeoConfig
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.gpt_neo import modeling_gpt_neo

from metatokens.errors import UserError
from metatokens.model.configuration import MetaGPT2Config, never_generated
from metatokens.model.positions import check_length


class NotInGPTNeo(UserError, AttributeError):
    """GPT-Neo was asked for a part that only `MetaGPT2Model` has."""


# Under its parent's name, which transformers writes into config.json for other programs to read.
class GPTNeoForCausalLM(modeling_gpt_neo.GPTNeoForCausalLM):
    """transformers' `GPTNeoForCausalLM`; in its configuration are `meta_token_id` and `position_embedding`, "learned".

    Raises:
        UserError: if the meta-token is outside the vocabulary.
    """

    # Causal masks, which older checkpoints hold beside the weights.
    _keys_to_ignore_on_load_unexpected = (r"\.attn\.attention\.(masked_)?bias$",)

    def __init__(self, config: GPTNeoConfig):
        config.position_embedding = "learned"
        config.meta_token_id = getattr(config, "meta_token_id", None)
        if config.meta_token_id is not None and not 0 <= config.meta_token_id < config.vocab_size:
            raise UserError(f"meta_token_id {config.meta_token_id} is outside the vocabulary of {config.vocab_size}.")
        super().__init__(config)

    @classmethod
    def like(cls, config: MetaGPT2Config) -> "GPTNeoForCausalLM":
        """A randomly initialised GPT-Neo of the sizes, activation and special tokens of one of this package's models.

        Biases, the initialisation and the window of 256 tokens in every second layer are GPT-Neo's.

        Raises:
            UserError: if the configuration asks for what GPT-Neo lacks.
        """
        asked = (config.position_embedding, config.second_attention, config.attention_scale)
        if asked != ("learned", "none", "constant"):
            raise UserError(
                "a gpt_neo has learned positions, no second attention and constant scales: set "
                "model.position_embedding=learned, model.second_attention=none and model.attention_scale=constant."
            )
        pairs, rest = divmod(config.num_hidden_layers, 2)
        return cls(
            GPTNeoConfig(
                vocab_size=config.vocab_size,
                hidden_size=config.hidden_size,
                num_layers=config.num_hidden_layers,
                attention_types=[[["global", "local"], pairs]] + [[["global"], 1]] * rest,
                num_heads=config.num_attention_heads,
                intermediate_size=config.intermediate_size,
                max_position_embeddings=config.max_position_embeddings,
                activation_function=config.activation,
                layer_norm_epsilon=config.layer_norm_epsilon,
                initializer_range=config.initializer_range,
                bos_token_id=config.bos_token_id,
                eos_token_id=config.eos_token_id,
                pad_token_id=config.pad_token_id,
                meta_token_id=config.meta_token_id,
                unpadded_vocab_size=config.unpadded_vocab_size,
            )
        )

    @torch.no_grad()
    def add_meta_token(self) -> None:
        """Put a meta-token behind the vocabulary, its embedding the mean of the others.

        The other logits stay as they are. The new one is their mean, so that the meta-token is at most as likely as
        the average token (Jensen), and the loss at no token grows by more than log(1 + 1 / vocabulary).
        """
        entries = self.config.vocab_size
        self.resize_token_embeddings(entries + 1, mean_resizing=False)
        for table in {self.transformer.wte.weight, self.lm_head.weight}:  # one if they are tied
            table[entries] = table[:entries].mean(dim=0)
        self.config.meta_token_id, self.config.unpadded_vocab_size = entries, entries + 1

    @property
    def model(self) -> "FinalStates":
        """What gives the final states, as `MetaGPT2ForCausalLM.model` does."""
        return FinalStates(self)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """As transformers', but in training mode with labels only the logits that a label scores are computed.

        Args:
            input_ids: (batch, length).
            attention_mask, position_ids, past_key_values, use_cache: as of transformers' `forward`. Named, since
                `generate` makes those that it finds in the signature.
            labels: (batch, length), the input's own ids, -100 where nothing is to be predicted; shifted here.
            **kwargs: as of transformers' `forward`, `num_items_in_batch` included.

        Returns:
            Logits (batch, length, vocabulary), or (labels, vocabulary) in training mode with labels.

        Raises:
            UserError: if the sequence is longer than the table of positions.
        """
        cached = 0 if past_key_values is None else past_key_values.get_seq_length()
        check_length(self.config, cached + input_ids.shape[1])  # with padding, which its causal masks have no room for
        inputs = {"position_ids": position_ids, "past_key_values": past_key_values} | kwargs
        if labels is None or not self.training:
            return super().forward(
                input_ids, attention_mask=attention_mask, labels=labels, use_cache=use_cache, **inputs
            )
        # Without a mask, transformers takes positions that leave some out for several sequences packed into one.
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        targets = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        keep = targets != -100
        states = self.transformer(input_ids, attention_mask=mask, use_cache=bool(use_cache), **inputs)
        logits = self.lm_head(states.last_hidden_state[keep])
        loss = self.loss_function(logits, None, self.config.vocab_size, shift_labels=targets[keep], **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits)

    def generate(self, *args: Any, meta_every: int | None = None, **kwargs: Any) -> Any:
        """As transformers', but never a meta-token or a row that pads the vocabulary.

        Raises:
            UserError: if `meta_every` asks for inserted ones.
        """
        if meta_every is not None:
            raise UserError("meta_every is for this package's own models; a gpt_neo generates without meta-tokens.")
        suppressed = [*never_generated(self.config), *(kwargs.pop("suppress_tokens", None) or ())]
        return super().generate(*args, suppress_tokens=suppressed or None, **kwargs)


class FinalStates:
    """GPT-Neo below its head, called like a `MetaGPT2Model`.

    Raises:
        NotInGPTNeo: if asked for a part of that model, as interventions and analyses do.
    """

    def __init__(self, model: GPTNeoForCausalLM):
        self._model = model

    def __call__(self, input_ids: Tensor, *, keep: Tensor | None = None, **kwargs: Any) -> BaseModelOutputWithPast:
        """Final states (batch, length, width) of `input_ids` (batch, length), or what the index `keep` takes of them.

        Raises:
            UserError: if the sequence is longer than the table of positions.
        """
        check_length(self._model.config, input_ids.shape[1])
        outputs = self._model.transformer(input_ids, **kwargs)
        if keep is not None:
            outputs.last_hidden_state = outputs.last_hidden_state[keep]
        return outputs

    def __getattr__(self, name: str) -> Any:
        raise NotInGPTNeo(
            f"interventions and analyses are for this package's own models; a gpt_neo has no {name!r} to look at."
        )
