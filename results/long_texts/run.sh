#!/bin/sh
# A needle and a chain of variables, learned in prompts of 128 tokens and asked for in up to 2,048 tokens of a book.
#
#     sh results/long_texts/run.sh runs/long_texts runs/retrofit book.txt.gz
#
# Run it from the root of the repository. It begins with the retrofitted Llama of results/retrofit/run.sh. Two processes of one thread; the same command goes on
# where it was cut off. lm-evaluation-harness, which has to be installed too, measures them; the result lines are
# gathered in results.jsonl.gz.
set -eu
out=$1 meta=$2/meta book=$3 here=$(dirname "$0")
export OMP_NUM_THREADS=1
mkdir -p "$out"

learn() { # task, tokens of the first records
    task=$1
    hide() { python -m examples.lm_eval.tasks --model "$meta" --tasks "$task" --corpus "$book" "$@"; }
    [ -f "$out/easy-$task/metatokens.yaml" ] || hide --lengths "$2" -n 1 --train 32000 --out "$out/easy-$task"
    [ -f "$out/long/$task/metatokens.yaml" ] ||
        hide --lengths 128,256,512,1024,2048 -n 500 --train 32000 --out "$out/long/$task"
    metatokens finetune --recipe "$here/finetune.yaml" --model "$meta" --set training.lora_rank=16 \
        --data "$out/easy-$task/${task}_train.jsonl" --out "$out/$task-easy"
    metatokens finetune --recipe "$here/finetune.yaml" --model "$out/$task-easy/data" --set training.lora_rank=16 \
        --data "$out/long/$task/${task}_train.jsonl" --out "$out/$task"
    python -m metatokens.evaluation.lm_eval --model metatokens --model_args "pretrained=$out/$task/data,marker=_PAUSE_" \
        --include_path "$out/long/$task" --tasks "metatokens_${task}_*" --output_path "$out/harness-$task.json"
}

learn needle 64 & first=$!
learn variable_tracking 96 & second=$!
wait $first
wait $second
python - "$out" <<'PYTHON'
import gzip
import json
import sys
from pathlib import Path

from metatokens.evaluation.intervals import wilson_interval
from metatokens.records import Result, stamped

out, lines = Path(sys.argv[1]), []
for task, by_places in {"needle": 1 / 4, "variable_tracking": 1 / 20}.items():
    *_, measured = sorted(out.glob(f"harness-{task}_*.json"))
    for name, figures in json.loads(measured.read_text())["results"].items():
        n, value = figures["sample_len"], figures["exact_match,trimmed"]
        low, high = wilson_interval(round(n * value), n)
        about = {"model": "meta+lora", "task": task, "train_length": 128, "length": int(name.rpartition("_")[2])}
        found = {"metric": "exact_match", "value": value, "n": n, "low": low, "high": high, "chance": by_places}
        lines.append(Result(**about, **found, seed=0))
lines.sort(key=lambda line: (line.task, line.length))
text = "".join(f"{line.line()}\n" for line in stamped(lines))
(out / "results.jsonl.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
PYTHON
