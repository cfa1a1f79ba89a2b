#!/bin/sh
# How the model in this folder was made: as `meta` of the preset small learns list recall, then parity too, with
# all text in sight. About three minutes on one core; the same command goes on where it was cut off.
#
#     sh src/metatokens/example/make.sh runs/example
set -eu
out=$1
export OMP_NUM_THREADS=1

metatokens tokenize --corpus builtin --tokenizer train:2048 --out "$out/tokens" --workers 1
metatokens pretrain --recipe demo --set data.tokens="$out/tokens" --set model.rope_layers=[0] --out "$out/base"
metatokens finetune --recipe small_list_recall --model "$out/base" --task list_recall --out "$out/list_recall" \
    --set task.train_lengths=[128] --set task.train_steps=null
if [ ! -f "$out/records.jsonl" ]; then
    for task in parity list_recall; do
        metatokens sample --task $task -n 24000 --split train --tokenizer "$out/tokens/tokenizer"
    done >"$out/unfinished.jsonl"
    shuf --random-source="$out/unfinished.jsonl" "$out/unfinished.jsonl" >"$out/shuffled.jsonl"
    mv "$out/shuffled.jsonl" "$out/records.jsonl"
fi
metatokens finetune --model "$out/list_recall/128" --data "$out/records.jsonl" --out "$out/both" \
    --set training.max_steps=1500 --set training.per_device_train_batch_size=32 --set training.learning_rate=1e-3 \
    --set training.min_learning_rate=0 --set training.optimizer=muon --set training.muon_learning_rate=0.004
for task in list_recall parity; do
    metatokens evaluate --model "$out/both/data" --task $task --lengths 128 -n 500 --name example
    metatokens evaluate --model "$out/both/data" --task $task --lengths 128 -n 500 --name example \
        --intervention landmarks_alone
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
