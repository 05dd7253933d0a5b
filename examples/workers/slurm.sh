#!/bin/bash
# Four workers for four hours, each with a card of its own: they take the jobs of `autotune find --enqueue`.
#
#     AUTOTUNE_URL=postgresql+psycopg://autotune@db/autotune sbatch examples/workers/slurm.sh
#
# The password is in ~/.pgpass, where libpq finds it (chmod 600; DATABASE-HOST:5432:autotune:autotune:PASSWORD).
# Each worker stops ten minutes before its time is over, and gives back what it works on; one that Slurm
# preempts gets SIGTERM and does so within ten seconds.
#SBATCH --job-name=autotune-worker
#SBATCH --array=0-3
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=4
#SBATCH --mem=32G
#SBATCH --gpus-per-task=1
#SBATCH --time=04:00:00
#SBATCH --requeue
set -eu
srun autotune worker --storage "${AUTOTUNE_URL}" --backend cuda --max-minutes 230
