"""examples/workers: what each says is what the others understand."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from autotune import cli
from autotune.catalogue import gpus

pytestmark = pytest.mark.worker

EXAMPLES = Path(__file__).parents[2] / "examples" / "workers"
URL = "postgresql+psycopg://autotune@db/autotune"


def parsed(words: list[str]) -> dict[str, Any]:
    """The options of an autotune command, as click reads them: what is unknown is an error."""
    assert words[0] == "autotune"
    command = cli.cli.commands[words[1]]
    context: click.Context = command.make_context(words[1], words[2:])
    return context.params


def minutes(text: str) -> int:
    hours, rest, _ = map(int, text.split(":"))
    return 60 * hours + rest


def test_the_deployment_starts_workers_that_find_their_secret() -> None:
    text = (EXAMPLES / "kubernetes.yaml").read_text(encoding="utf-8")
    secret, deployment = yaml.safe_load_all(text)
    pod = deployment["spec"]["template"]
    assert deployment["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]
    (container,) = pod["spec"]["containers"]
    values = {}
    for entry in container["env"]:
        key = entry["valueFrom"]["secretKeyRef"]
        assert key["name"] == secret["metadata"]["name"]
        values[entry["name"]] = secret["stringData"][key["key"]]
    # As the kubelet does it.
    words = [re.sub(r"\$\((\w+)\)", lambda m: values[m[1]], word) for word in container["command"]]
    options = parsed(words)
    assert (options["storage"], options["backend"]) == (values["AUTOTUNE_URL"], "cuda")
    assert values["PGPASSWORD"] not in options["storage"]
    assert pod["spec"]["terminationGracePeriodSeconds"] > 10
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["spec"]["volumes"]}
    assert gpus.find_gpu(pod["metadata"]["labels"]["card"])


def test_the_array_job_ends_its_workers_before_slurm_does() -> None:
    script = EXAMPLES / "slurm.sh"
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text(encoding="utf-8")
    directives = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, re.MULTILINE))
    (line,) = re.findall(r"^srun (.*)$", text, re.MULTILINE)
    options = parsed(shlex.split(line.replace("${AUTOTUNE_URL}", URL)))
    assert (options["storage"], options["backend"]) == (URL, "cuda")
    assert options["max_minutes"] < minutes(directives["time"])
    assert directives["gpus-per-task"] == "1"


@pytest.mark.parametrize("path", sorted(EXAMPLES.iterdir()), ids=lambda path: path.name)
def test_the_commands_that_its_comments_name_are_understood(path: Path) -> None:
    commands = re.findall(r"`(autotune [^`]*)`", path.read_text(encoding="utf-8"))
    assert commands
    for command in commands:
        parsed(shlex.split(command))
