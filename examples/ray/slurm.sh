#!/bin/bash
# A search on all GPUs of two nodes of a Slurm cluster: sbatch examples/ray/slurm.sh
# The same Python, autotune and Ray must be found on every node. Not yet run on a Slurm cluster.
#SBATCH --job-name=autotune
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=02:00:00
set -euo pipefail

head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# Ray starts on every node and ends with the search, which runs on the first one.
srun ray symmetric-run --address "$head_node:6379" --min-nodes "$SLURM_JOB_NUM_NODES" \
    --num-cpus "$SLURM_CPUS_PER_TASK" --num-gpus 4 -- \
    autotune find --model Qwen/Qwen2.5-1.5B --effective-batch 64 --on auto --out answer
