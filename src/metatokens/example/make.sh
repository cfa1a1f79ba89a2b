#!/bin/sh
# How the model in this folder was made: pretrained on the built-in text, taught copying, then copying and list recall
# together. About a quarter of an hour on one core; the same command goes on where it was cut off. The committed weights
# are from commit 1df599d, when a stage of small_copying ended once the model answered its prompts; now it has fixed steps.
#
#     sh src/metatokens/example/make.sh runs/example
set -eu
out=$1
export OMP_NUM_THREADS=1

metatokens tokenize --corpus builtin --tokenizer train:2048 --out "$out/tokens" --workers 1
metatokens pretrain --recipe demo --set data.tokens="$out/tokens" --out "$out/base"
metatokens finetune --recipe small_copying --model "$out/base" --task copying --out "$out/copying" \
    --set task.train_lengths=[128] --set task.train_steps=[1500]
if [ ! -f "$out/records.jsonl" ]; then
    for phase in 1 2; do
        for task in "copying -n 30000" "list_recall -n 12000"; do
            metatokens sample --task $task --phase $phase --split train --tokenizer "$out/tokens/tokenizer"
        done
    done >"$out/unfinished.jsonl"
    shuf --random-source="$out/unfinished.jsonl" "$out/unfinished.jsonl" >"$out/shuffled.jsonl"
    mv "$out/shuffled.jsonl" "$out/records.jsonl"
fi
metatokens finetune --model "$out/copying/128" --data "$out/records.jsonl" --out "$out/both" \
    --set training.max_steps=2500 --set training.per_device_train_batch_size=32 --set training.learning_rate=1e-3 \
    --set training.min_learning_rate=0 --set training.optimizer=muon --set training.muon_learning_rate=0.004
for task in copying list_recall; do
    metatokens evaluate --model "$out/both/data" --task $task --lengths 128 -n 500 --name example
done

# Half the size on disk: the weights in half precision, read as single precision.
python - "$out/both/data" "$(dirname "$0")" <<'PYTHON'
import sys
from pathlib import Path

import torch

from metatokens.data.tokenizer import load_tokenizer
from metatokens.checkpoint import load_model, save_model, write_manifest
from metatokens.model.configuration import REMOTE_CODE_FILE

source, target = map(Path, sys.argv[1:])
model = load_model(source)
halves = {name: weight.to(torch.float16) for name, weight in model.state_dict().items() if name != "lm_head.weight"}
save_model(model, load_tokenizer(str(source)), target, halves)
(target / REMOTE_CODE_FILE).unlink()  # for who has no metatokens
write_manifest(target)
PYTHON
