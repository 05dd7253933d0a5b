#!/bin/sh
# From nothing to a trained adapter on a card of 12 GB:
#
#     sh examples/train-on-12gb.sh data.jsonl
#
# data.jsonl has an object per line: a chat, a pair or a text (docs/how-to/dataset.md). On the card the
# configuration is measured; where there is none it is predicted, and train.py goes to the card.
# MODEL, and other options of find (FIND) and train.py (TRAIN), may be set beforehand.
set -eu
data=$1
MODEL=${MODEL:-Qwen/Qwen2.5-1.5B}

# The fastest adapter that fits, with what is known of the data's lengths.
# FIND and TRAIN are several words.
# shellcheck disable=SC2086
autotune find --model "$MODEL" --gpu-mem 12GB --method lora --method qlora --allow recipe \
    --dataset "$data" --study adapter --out adapter ${FIND:-}

# The whole recipe is in adapter/train.py, which needs autotune no longer.
# shellcheck disable=SC2086
python adapter/train.py --dataset "$data" --output-dir adapter/trained ${TRAIN:-}

# PeftModel.from_pretrained takes this folder.
ls adapter/trained
