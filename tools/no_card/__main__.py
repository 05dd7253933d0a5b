"""Run a command with PyTorch's CUDA build where there is no card: nothing is computed, memory is real.

    python -m tools.no_card --gpu H200 -- python -m tools.gpu_check predict --studies no-card

The command finds a card of the catalogue (autotune gpus) that is not there, or several like it (--num-gpus):
a CUDA runtime, driver, cuBLAS, cuDNN, NCCL and NVML that compute and send nothing. All the rest runs as on
that card: PyTorch's own choice of kernels, its autocast, its autograd, its optimizers and its caching
allocator, bitsandbytes, Triton; out of memory comes where the card would have no more. So a prediction of
memory is held against PyTorch itself, byte for byte, and the program is tried from end to end.

What it cannot tell, and no record of it may be taken for: any time; what the card holds outside PyTorch's
allocator (the context is put in: --context-mib); workspaces of cuDNN and cuBLASLt, NCCL's buffers; what
depends on values (a value that is read back is always one, and so every mask is full; with --padded
Tensor.all() is no, and so none is); managed memory. Records name the driver "no card".

Needs a CUDA build of torch, a C++ compiler, and the headers of the CUDA toolkit. Linux alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
import tempfile
from pathlib import Path

from autotune.catalogue.gpus import find_gpu
from autotune.errors import ConfigError
from tools.no_card.card import LIBRARIES, MOST_CARDS, build, environment


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.no_card", description="Run a command as if a card were here."
    )
    parser.add_argument("--gpu", default="H200", help="of the catalogue [default: H200]")
    parser.add_argument(
        "--num-gpus",
        type=int,
        choices=range(1, MOST_CARDS + 1),
        default=1,
        metavar="N",
        help="cards alike [default: 1]",
    )
    parser.add_argument(
        "--context-mib", type=int, help="of each process [default: as is predicted]"
    )
    parser.add_argument("--memory-gib", type=int, help="another card's [default: its own]")
    parser.add_argument("--padded", action="store_true", help="no batch is full of tokens")
    parser.add_argument("--cuda", type=Path, default=Path("/usr/local/cuda"), help="the toolkit")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    try:
        card = find_gpu(options.gpu)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if card.vendor != "nvidia":
        parser.error(f"the {card.name} does no CUDA")
    if options.memory_gib is not None:
        card = dataclasses.replace(card, capacity_bytes=options.memory_gib << 30)
    context_bytes = card.context_bytes
    if options.context_mib is not None:
        context_bytes = options.context_mib << 20
    assert context_bytes is not None  # every card of the catalogue that does CUDA has one
    with tempfile.TemporaryDirectory(prefix="no-card-") as scratch:
        folder = Path(scratch)
        try:
            for name in LIBRARIES:
                build(folder, name, options.cuda)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"error: no card can be made: {error}", file=sys.stderr)
            return 1
        (folder / "libcuda.so").symlink_to("libcuda.so.1")  # Triton's compiler links it.
        variables = environment(
            folder,
            card,
            context_bytes,
            num_cards=options.num_gpus,
            padded=options.padded,
        )
        return subprocess.run(options.command, env=variables, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
