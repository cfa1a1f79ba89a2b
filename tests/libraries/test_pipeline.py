"""transformers' text-generation pipeline, in batches."""

from pathlib import Path

from transformers import AutoTokenizer, pipeline

import metatokens  # noqa: F401  (registers the model)

PROMPTS = ["the cat", "two dogs ran over green hills and a river", "spring"]


def test_a_batch_gives_what_each_prompt_gives_alone(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    generate = pipeline("text-generation", str(folder), tokenizer=tokenizer)
    options = {"max_new_tokens": 5, "do_sample": False}
    together = generate(PROMPTS, batch_size=3, **options)
    alone = [generate(prompt, **options) for prompt in PROMPTS]
    assert together == alone


def test_a_prompt_with_meta_tokens(folder: Path) -> None:
    generate = pipeline("text-generation", str(folder))
    options = {"return_tensors": True, "max_new_tokens": 2, "do_sample": False}
    special = {"tokenizer_encode_kwargs": {"split_special_tokens": False}}
    (marked,) = generate("the cat<|meta|> sat", **options, **special)
    (plain,) = generate("the cat<|meta|> sat", **options)
    assert marked["generated_token_ids"].count(generate.tokenizer.meta_token_id) == 1
    assert generate.tokenizer.meta_token_id not in plain["generated_token_ids"]
