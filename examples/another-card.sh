#!/bin/sh
# Tuning for cards that you do not own: what each would be worth.
#
#     sh examples/another-card.sh rtx-4070 l4
#
# The names are those of `autotune gpus`; `autotune max --what gpu` says which card is the smallest
# that would do. Everything is predicted, on any machine, without a GPU: on the card itself the same
# `autotune find` measures. MODEL and MORE (other options of find) may be set beforehand.
set -eu
MODEL=${MODEL:-Qwen/Qwen2.5-1.5B}

# The fastest configuration on each, with all of the card's memory.
studies=
for gpu in "$@"; do
    # MORE is several words.
    # shellcheck disable=SC2086
    autotune find --model "$MODEL" --gpu "$gpu" --backend predict --study "on-$gpu" ${MORE:-}
    studies="$studies on-$gpu"
done

# What differs between them: settings, speed, memory.
# shellcheck disable=SC2086
autotune studies compare $studies
