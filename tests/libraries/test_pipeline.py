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
    assert together == [generate([prompt], **options)[0] for prompt in PROMPTS]
    assert all(answer[0]["generated_text"].startswith(prompt) for answer, prompt in zip(together, PROMPTS, strict=True))


def test_a_prompt_with_meta_tokens(folder: Path) -> None:
    generate = pipeline("text-generation", str(folder))
    special = {"tokenizer_encode_kwargs": {"split_special_tokens": False}}
    out = generate("the cat<|meta|> sat", return_tensors=True, max_new_tokens=2, do_sample=False, **special)
    assert out[0]["generated_token_ids"].count(generate.tokenizer.meta_token_id) == 1
    plain = generate("the cat<|meta|> sat", return_tensors=True, max_new_tokens=2, do_sample=False)
    assert generate.tokenizer.meta_token_id not in plain[0]["generated_token_ids"]
