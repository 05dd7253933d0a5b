"""`accelerate launch` whose processes are forked from its own, which has imported what they need.

    python launch_forked.py --config_file FILE ... PROGRAM ARGUMENT ...

torch's launcher starts `python PROGRAM` else; a function, which it takes too, it can have forked.
"""

import dataclasses
import runpy
import sys
from typing import Any

import torch.distributed.run as launcher
from accelerate.commands.launch import launch_command, launch_command_parser

config_of = launcher.config_from_args


def run_program(*words: str) -> None:
    sys.argv = list(words)
    runpy.run_path(words[0], run_name="__main__")


def config_with_forks(arguments: Any) -> tuple[Any, Any, list[str]]:
    config, _, (unbuffered, *words) = config_of(arguments)
    assert unbuffered == "-u"
    return dataclasses.replace(config, start_method="fork"), run_program, words


launcher.config_from_args = config_with_forks
launch_command(launch_command_parser().parse_args(sys.argv[1:]))
