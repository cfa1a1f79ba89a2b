#!/bin/sh
# What meta-attention adds to a Llama that was pretrained without it: list recall and parity, two seeds.
#
#     sh results/retrofit/run.sh runs/retrofit 'c4/*.jsonl.gz'
#
# Two processes of one thread. The same command goes on where it was cut off. The result lines are gathered in
# results.jsonl.gz.
set -eu
out=$1 corpus=$2 here=$(dirname "$0")
export OMP_NUM_THREADS=1
mkdir -p "$out"

if [ ! -f "$out/base/manifest.json" ]; then
    metatokens tokenize --corpus "$corpus" --tokenizer train:8192 --out "$out/tokens" --workers 2
    python - "$out" "$corpus" <<'PYTHON'
import gzip
import json
import sys
from glob import glob

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from metatokens.data.tokenizer import load_tokenizer

out, corpus = sys.argv[1:]
tokenizer = load_tokenizer(f"{out}/tokens/tokenizer")
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=8192,
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    tie_word_embeddings=True,
    bos_token_id=tokenizer.eos_token_id,
    eos_token_id=tokenizer.eos_token_id,
    max_position_embeddings=1024,
    # 1 / sqrt(width). With the usual 0.02, tied embeddings of this width stay so short in so little pretraining that no
    # adapter makes the frozen output head sure of anything: on parity the loss stays at 1.35, where guessing has 0.35.
    initializer_range=1 / 16,
)
LlamaForCausalLM(config).save_pretrained(f"{out}/untrained")
tokenizer.save_pretrained(f"{out}/untrained")

# The same text, each 50 tokens twice: a model learns from it to look up what stood before, as larger models do from more
# text than there is here.
with open(f"{out}/twice.jsonl", "w", encoding="utf-8") as lines:
    for path in sorted(glob(corpus)):
        with gzip.open(path, "rt", encoding="utf-8") as documents:
            for document in documents:
                ids = tokenizer(json.loads(document)["text"])["input_ids"]
                for start in range(0, len(ids) - 49, 50):
                    passage = tokenizer.decode(ids[start : start + 50])
                    lines.write(json.dumps({"text": f"{passage}\n{passage}"}) + "\n")
PYTHON
    metatokens tokenize --corpus "$out/twice.jsonl" --tokenizer "$out/tokens/tokenizer" --out "$out/twice" --workers 2
    pretrain() { # from, to, tokens, steps, options
        init=$1 to=$2 tokens=$3 steps=$4
        shift 4
        OMP_NUM_THREADS=2 metatokens pretrain --recipe demo --init "$out/$init" --out "$out/$to" \
            --set data.tokens="$out/$tokens" --set data.placement=none --set data.block_size=256 \
            --set training.per_device_train_batch_size=16 --set training.max_steps="$steps" \
            --set training.warmup_steps=50 \
            --set training.learning_rate=1e-3 --set training.eval_steps=200 --set training.save_steps=100 "$@"
    }
    pretrain untrained text tokens 1000 --set training.min_learning_rate=1e-4
    pretrain text base twice 600 --set training.min_learning_rate=0
fi
[ -f "$out/meta/manifest.json" ] || metatokens retrofit --model "$out/base" --heads 8 --head-size 32 --out "$out/meta"
[ -f "$out/pause/manifest.json" ] || metatokens retrofit --model "$out/base" --layers none --out "$out/pause"

# An arm is a retrofitted model and what of it is trained: what was added, or that and adapters in the base.
arm() { # name, model, options
    name=$1 model=$2
    shift 2
    for task in list_recall parity; do
        case $task in list_recall) condition=landmark ;; parity) condition=paper ;; esac
        run="$out/$name-$task-seed$seed"
        metatokens finetune --recipe "$here/$task.yaml" --model "$out/$model" --task $task --out "$run" \
            --set training.seed=$seed "$@"
        [ -f "$run/results.jsonl" ] && continue
        rm -f "$run/unfinished.jsonl"
        metatokens evaluate --model "$run/128" --task $task --condition $condition --lengths 128,256,512,1024 -n 500 \
            --name "$name" --out "$run/unfinished.jsonl" >/dev/null
        mv "$run/unfinished.jsonl" "$run/results.jsonl"
    done
}

both() {
    arm meta+lora meta --set training.lora_rank=16
    arm lora pause --set training.lora_rank=16
    arm meta meta
    arm pause pause
    arm wide-lora pause --set training.lora_rank=72 # as many parameters as meta+lora trains
}

(seed=0 && both) & first=$!
(seed=1 && both) & second=$!
wait $first
wait $second
python - "$out" <<'PYTHON'
import gzip
import sys
from pathlib import Path

from metatokens.data.tokenizer import load_tokenizer
from metatokens.evaluation.accuracy import draw_test_examples, shortcut_rates
from metatokens.records import stamped

out = Path(sys.argv[1])
lines = [line for run in sorted(out.glob("*-seed[01]")) for line in (run / "results.jsonl").read_text().splitlines()]
tokenizer = load_tokenizer(str(out / "meta"))
for task, condition in {"list_recall": "landmark", "parity": "paper"}.items():
    about = {"condition": condition, "documents": []}
    tests = {length: draw_test_examples(task, length, 500, tokenizer, **about) for length in (128, 256, 512, 1024)}
    lines += [rate.line() for rate in stamped(shortcut_rates(task, condition, tests, tokenizer, []))]
(out / "results.jsonl.gz").write_bytes(gzip.compress("".join(f"{line}\n" for line in lines).encode(), mtime=0))
PYTHON
