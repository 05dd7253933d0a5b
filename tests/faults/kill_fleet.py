"""Kill a search on a Ray cluster at random moments; nothing that was measured may be lost.

    python -m tests.faults.kill_fleet [--kills 30] [--seed 1]

Needs Ray. Starts a cluster of a head and three machines with one stand-in for a card each, all on this one,
and searches studies/cpu-sweep in it with probes that sleep: again and again, each time killing an actor's
process, a machine, or the search itself (SIGKILL) after a random time. Where an actor or a machine dies,
the search must end with the winner of an undisturbed one, or one tied with it; where the search is killed,
its actors must go, and the same command later goes on. After each kill every probe that was in the database
still is. In the end no trial is open, and no process is left. Prints what happened; exits 1 when anything
of this fails.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from autotune.records.measurement import NOISE

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests" / "support"
CARD = "autotune_card"
MARK = "AUTOTUNE_KILL_FLEET"
PROBE_SECONDS = 1.0
KILLS = ("actor", "machine", "search")
KILLS_OF_A_STUDY = 5
GONE_SECONDS = 30.0
SEARCH_SECONDS = 300.0


def start(address: str, url: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", str(SUPPORT / "stand_in_cards.py"), address, url],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def actor_processes() -> list[int]:
    """Processes of actors of this script's cluster."""
    mark = f"{MARK}={os.getpid()}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if (
                b"StandInActor" in (entry / "cmdline").read_bytes()
                and mark in (entry / "environ").read_bytes()
            ):
                found.append(int(entry.name))
        except OSError:
            continue
    return sorted(found)


def in_database(file: Path, statement: str) -> list[Any]:
    """Rows; none before there is such a table."""
    if not file.exists():
        return []
    connection = sqlite3.connect(file, timeout=10)
    try:
        return [row[0] for row in connection.execute(statement)]
    except sqlite3.OperationalError:
        return []
    finally:
        connection.close()


def probes(file: Path) -> set[int]:
    return set(in_database(file, "SELECT id FROM autotune_probes"))


def winner(out: str) -> str:
    """The configuration that the search printed last; Ray may print before it."""
    return out.strip().splitlines()[-1].rpartition("}")[0]


def speed(out: str) -> float:
    """The winner's tokens per second."""
    return float(out.rpartition("}")[2].split()[0])


def is_tied(out: str, other: str) -> bool:
    """Whether two searches found the same winner, or winners whose speeds are tied."""
    return abs(speed(out) - speed(other)) <= NOISE * max(speed(out), speed(other))


class Round:
    """One search that is disturbed, and what went wrong."""

    def __init__(self, cluster: Any, machines: list[Any], rng: random.Random) -> None:
        self.cluster, self.machines, self.rng = cluster, machines, rng
        self.problems: list[str] = []
        self.num_tied = self.num_same = 0
        """Searches with a winner within the noise of the undisturbed one's, and with that winner itself."""

    def problem(self, said: str) -> None:
        self.problems.append(said)
        print(said, flush=True)

    def kill(self, whom: str, process: subprocess.Popen[str]) -> bool:
        """Whether there was something to kill."""
        if process.poll() is not None:
            return False
        if whom == "search":
            process.kill()
            return True
        if whom == "machine":
            gone = self.machines.pop(self.rng.randrange(len(self.machines)))
            self.cluster.remove_node(gone, allow_graceful=False)
            self.machines.append(self.cluster.add_node(num_cpus=1, resources={CARD: 1}))
            return True
        running = actor_processes()
        if not running:
            return False
        os.kill(self.rng.choice(running), signal.SIGKILL)
        return True

    def disturbed(self, url: str, file: Path, whom: str, right: str) -> bool:
        """Search, and kill in the middle. Return whether it was killed before it was done."""
        process = start(self.cluster.address, url)
        assert process.stderr is not None
        process.stderr.readline()  # the cards are taken
        time.sleep(self.rng.uniform(0.2, 4 * PROBE_SECONDS))
        before = probes(file)
        has_killed = self.kill(whom, process)
        out, err = process.communicate(timeout=SEARCH_SECONDS)
        if lost := before - probes(file):
            self.problem(f"{whom}: probes {sorted(lost)} are lost")
        if whom != "search":
            if process.returncode:
                self.problem(f"{whom}: ended with {process.returncode}: {err[-1000:]}")
            elif not is_tied(out, right):
                self.problem(f"{whom}: another winner: {out} for {right}")
            else:
                self.num_same += winner(out) == winner(right)
                self.num_tied += 1
        until = time.monotonic() + GONE_SECONDS
        while actor_processes() and time.monotonic() < until:
            time.sleep(0.2)
        if left := actor_processes():
            self.problem(f"{whom}: processes {left} are left")
        return has_killed


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    os.environ[MARK] = str(os.getpid())
    os.environ["AUTOTUNE_STAND_IN_SECONDS"] = str(PROBE_SECONDS)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(SUPPORT)])
    with tempfile.TemporaryDirectory(prefix="kf", dir="/tmp") as name:
        # Ray's sockets lie there, and their paths must be short.
        os.environ["RAY_TMPDIR"] = name
        from ray.cluster_utils import Cluster

        cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
        )
        try:
            machines = [cluster.add_node(num_cpus=1, resources={CARD: 1}) for _ in range(3)]
            disturb = Round(cluster, machines, random.Random(options.seed))
            killed = _kill_all(disturb, Path(name), options.kills)
        finally:
            cluster.shutdown()
    for whom, count in sorted(killed.items()):
        print(f"{whom}: {count} killed")
    print(
        f"{disturb.num_tied} winners tied with the undisturbed one, {disturb.num_same} of them the same"
    )
    print(f"{len(disturb.problems)} problems")
    sys.exit(bool(disturb.problems))


def _kill_all(disturb: Round, folder: Path, num_kills: int) -> Counter[str]:
    address = disturb.cluster.address
    out, err = start(address, f"sqlite:///{folder}/undisturbed.db").communicate(
        timeout=SEARCH_SECONDS
    )
    if not out:
        sys.exit(f"the undisturbed search failed: {err}")
    right = out
    killed: Counter[str] = Counter()
    number = 0
    interrupted = set()
    while killed.total() < num_kills:
        # One that is complete has nothing left to disturb: begin another.
        whom = KILLS[number % len(KILLS)]
        study = number // (len(KILLS) * KILLS_OF_A_STUDY) if whom == "search" else number
        file = folder / f"killed-{whom}-{study}.db"
        number += 1
        if disturb.disturbed(f"sqlite:///{file}", file, whom, right):
            killed[whom] += 1
            if whom == "search":
                interrupted.add(file)
            print(f"{killed.total()} {whom}: {len(disturb.problems)} problems", flush=True)
    for file in sorted(folder.glob("killed*.db")):
        if file in interrupted:
            out, err = start(address, f"sqlite:///{file}").communicate(timeout=SEARCH_SECONDS)
            if not out or not is_tied(out, right):
                disturb.problem(f"{file.name}: another winner: {out} {err[-500:]}")
        open_trials = in_database(file, "SELECT number FROM trials WHERE state = 'RUNNING'")
        if open_trials:
            disturb.problem(f"{file.name}: trials {open_trials} are open")
    return killed


if __name__ == "__main__":
    main()
