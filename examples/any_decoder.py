"""From a base model to one that has meta-tokens, was trained on a text, and generates.

python examples/any_decoder.py BASE TEXT_FILE OUT    # needs trl
"""

import sys

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from metatokens import MetaTokenCollator, add_meta_attention, encode_prompt, save_meta

name, text, out = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(name)
model = add_meta_attention(AutoModelForCausalLM.from_pretrained(name), tokenizer)

lines = load_dataset("text", data_files=text, split="train").filter(lambda row: row["text"])
settings = SFTConfig(
    out, max_steps=20, per_device_train_batch_size=4, max_length=256, bf16=False, report_to="none"
)
trainer = SFTTrainer(model, settings, train_dataset=lines, processing_class=tokenizer)
trainer.data_collator = MetaTokenCollator(trainer.data_collator, tokenizer, "every:8")
trainer.train()

model.eval()
save_meta(model, f"{out}/added")  # the base is as it was
tokenizer.save_pretrained(f"{out}/added")
ids = torch.tensor([encode_prompt(tokenizer, lines[0]["text"][:40], landmarks="every:8")]).to(
    model.device
)
print(
    tokenizer.decode(
        model.generate(ids, max_new_tokens=20, meta_every=8)[0], skip_special_tokens=True
    )
)
