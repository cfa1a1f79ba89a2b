"""A made-up text with enough names and words for look-ups, and a small Llama with a tokenizer for it."""

import json
import random
from itertools import chain, product

import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from metatokens.data.tokenizer import END_OF_TEXT, load_tokenizer
from metatokens.shrink.lookups import read_forms

LONGEST = 448  # tokens of a text with look-ups
BLOCKS, KEY_HEADS, HEAD_SIZE, LIMIT = 3, 2, 8, 1024
TEMPLATE = (
    "{% for message in messages %}<|endoftext|>{{ message.role }}\n{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|endoftext|>assistant\n{% endif %}"
)


def made_up_documents():
    """Documents of ten sentences each, in which every word and every name occurs three times."""
    draw = random.Random(0)
    syllables = [consonant + vowel for consonant in "bdfgklmnprst" for vowel in "aeiou"]
    stems = draw.sample(["".join(row) for row in product(syllables, repeat=3)], 2000)
    words = draw.sample(stems[:1000] * 3, 3000)
    names = draw.sample(stems[1000:] * 3, 3000)
    pairs = [f"{word} {name.title()}" for word, name in zip(words, names, strict=True)]
    sentences = [f"The {' '.join(pairs[start : start + 4])}." for start in range(0, 3000, 4)]
    return [" ".join(sentences[start : start + 10]) for start in range(0, 750, 10)]


def plain_tokenizer(documents):
    """A tokenizer as others save it: without a meta-token, with a token before each text and a chat template."""
    forms = chain.from_iterable(read_forms().values())
    trained = load_tokenizer(
        "train:1500",
        corpus=documents,
        extra_texts=[text for form in forms for text in (*form.state, form.ask)],
    )
    backend = json.loads(trained.backend_tokenizer.to_str())
    backend["added_tokens"].pop()  # the meta-token
    backend = Tokenizer.from_str(json.dumps(backend))
    backend.post_processor = TemplateProcessing(
        single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, trained.eos_token_id)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def write_base(folder, tokenizer):
    """Save an untrained Llama, whose predictions are far from even, with its tokenizer."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=BLOCKS,
        num_attention_heads=4,
        num_key_value_heads=KEY_HEADS,
        head_dim=HEAD_SIZE,
        max_position_embeddings=LIMIT,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_documents(file, documents):
    """Write documents as a corpus of JSON lines."""
    lines = [json.dumps({"text": document}) + "\n" for document in documents]
    file.write_text("".join(lines), encoding="utf-8")
    return file
