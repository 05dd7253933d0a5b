"""Kill a search on a Ray cluster at random moments; nothing that was measured may be lost.

    python -m tests.faults.kill_fleet [--kills 30] [--seed 1] [--out studies/kill-fleet/kills.json]

Needs Ray. Starts a cluster of a head and three machines with one stand-in for a card each, all on this one,
and searches studies/cpu-sweep in it with probes that sleep: again and again, each time killing an actor's
process, a machine, or the search itself (SIGKILL) after a random time. Where an actor or a machine dies,
the search must end with the winner of an undisturbed one; where the search is killed, its actors must go, and
the same command later goes on, to that winner. After each kill every probe that was in the database still is.
In the end no trial is open, and no process is left. Then a whole cluster is killed under a search that is
connected to it as a driver, and another under one by Ray Client: each must say so in one line. Prints what
happened, and writes it as JSON; exits 1 when anything of this fails.

The stand-ins answer the same speed each time, and the best configuration of the sweep is 4 % faster than the
next, twice the noise: whatever order the probes end in, there is one right winner.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests" / "support"
CARD = "autotune_card"
MARK = "AUTOTUNE_KILL_FLEET"
PROBE_SECONDS = 1.0
KILLS = ("actor", "machine", "search")
KILLS_OF_A_STUDY = 5
GONE_SECONDS = 30.0
SEARCH_SECONDS = 300.0
OPEN_TRIALS = "SELECT number FROM trials WHERE state = 'RUNNING'"


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


class Round:
    """One search that is disturbed, and what went wrong."""

    def __init__(self, cluster: Any, machines: list[Any], rng: random.Random) -> None:
        self.cluster, self.machines, self.rng = cluster, machines, rng
        self.problems: list[str] = []
        self.kills: list[dict[str, Any]] = []
        """What was killed, when, and what came of it."""
        self.num_gone_on = 0
        """Studies whose search was killed and that later ended with the right winner."""

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
        after_seconds = self.rng.uniform(0.2, 4 * PROBE_SECONDS)
        time.sleep(after_seconds)
        before = probes(file)
        has_killed = self.kill(whom, process)
        killed_at = time.monotonic()
        out, err = process.communicate(timeout=SEARCH_SECONDS)
        kill: dict[str, Any] = {
            "killed": whom,
            "after_seconds": round(after_seconds, 2),
            "ended_after_seconds": round(time.monotonic() - killed_at, 1),
            "exit_code": process.returncode,
            "num_probes_stored": len(before),
            "num_probes_lost": len(before - probes(file)),
        }
        if lost := before - probes(file):
            self.problem(f"{whom}: probes {sorted(lost)} are lost")
        if whom != "search":
            if process.returncode:
                self.problem(f"{whom}: ended with {process.returncode}: {err[-1000:]}")
            else:
                kill["same_winner"] = winner(out) == winner(right)
                if not kill["same_winner"]:
                    self.problem(f"{whom}: another winner: {out} for {right}")
        until = time.monotonic() + GONE_SECONDS
        while actor_processes() and time.monotonic() < until:
            time.sleep(0.2)
        if left := actor_processes():
            self.problem(f"{whom}: processes {left} are left")
        if has_killed:
            self.kills.append({**kill, "num_processes_left": len(left)})
        return has_killed


def vanish(by_client: bool, folder: Path) -> dict[str, Any]:
    """Kill a whole cluster under a search; how that ended."""
    from ray.cluster_utils import Cluster

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    head: dict[str, Any] = {"num_cpus": 1, "include_dashboard": False}
    if by_client:
        head["ray_client_server_port"] = port
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = [*(cluster.add_node(num_cpus=1, resources={CARD: 1}) for _ in range(3))]
    address = f"ray://127.0.0.1:{port}" if by_client else cluster.address
    file = folder / f"gone-{by_client}.db"
    try:
        while by_client and not listens(port):
            time.sleep(0.2)
        process = start(address, f"sqlite:///{file}")
        assert process.stderr is not None
        process.stderr.readline()
        time.sleep(2.5 * PROBE_SECONDS)
        before = probes(file)
    finally:
        for node in [*nodes, cluster.head_node]:
            node.kill_all_processes(check_alive=False, allow_graceful=False)
    killed_at = time.monotonic()
    _, err = process.communicate(timeout=SEARCH_SECONDS)
    return {
        "killed": "cluster",
        "connected_by": "client" if by_client else "driver",
        "ended_after_seconds": round(time.monotonic() - killed_at, 1),
        "num_probes_stored": len(before),
        "num_probes_lost": len(before - probes(file)),
        "num_trials_open": len(in_database(file, OPEN_TRIALS)),
        "said": err.strip().splitlines()[-1].partition("Error: ")[2],
    }


def listens(port: int) -> bool:
    with socket.socket() as knocking:
        return knocking.connect_ex(("127.0.0.1", port)) == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "studies" / "kill-fleet" / "kills.json")
    options = parser.parse_args()
    begun = time.monotonic()
    os.environ[MARK] = str(os.getpid())
    os.environ["AUTOTUNE_STAND_IN_SECONDS"] = str(PROBE_SECONDS)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(SUPPORT)])
    with tempfile.TemporaryDirectory(prefix="kf", dir="/tmp") as name:
        # Ray's sockets lie there, and their paths must be short.
        os.environ["RAY_TMPDIR"] = name
        import ray
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
        for by_client in (False, True):
            ended = vanish(by_client, Path(name))
            disturb.kills.append(ended)
            if ended["num_probes_lost"] or ended["num_trials_open"] or not ended["said"]:
                disturb.problem(f"a cluster was killed: {ended}")
    record = {
        "seed": options.seed,
        "ray": ray.__version__,
        "seconds": round(time.monotonic() - begun),
        "killed": dict(sorted(killed.items())),
        "same_winner": sum(kill.get("same_winner", False) for kill in disturb.kills),
        "same_winner_gone_on": disturb.num_gone_on,
        "problems": disturb.problems,
        "kills": disturb.kills,
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for whom, count in sorted(killed.items()):
        print(f"{whom}: {count} killed")
    print(f"{record['same_winner']} searches ended with the undisturbed one's winner,")
    print(f"and {disturb.num_gone_on} studies of killed searches once they had gone on")
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
            if not out or winner(out) != winner(right):
                disturb.problem(f"{file.name}: another winner: {out} {err[-500:]}")
            else:
                disturb.num_gone_on += 1
        open_trials = in_database(file, OPEN_TRIALS)
        if open_trials:
            disturb.problem(f"{file.name}: trials {open_trials} are open")
    return killed


if __name__ == "__main__":
    main()
