"""How much memory the host has left, as files of the kernel say."""

from __future__ import annotations

from pathlib import Path

from autotune.catalogue import host_memory
from autotune.common.units import GIB


def system(root: Path, *, group: str, **files: int | str) -> Path:
    """A root with 64 GiB left and these files of the kernel: `a__b` is a/b below sys/fs/cgroup."""
    for name, text in {
        "proc/meminfo": f"MemTotal: 9 kB\nMemAvailable: {64 * 2**20} kB\n",
        "proc/self/cgroup": group,
        **{f"sys/fs/cgroup/{name.replace('__', '/')}": str(text) for name, text in files.items()},
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def test_memory_of_the_machine(tmp_path: Path) -> None:
    assert host_memory.left_bytes(tmp_path) is None
    assert host_memory.left_bytes(system(tmp_path, group="")) == 64 * GIB


def test_wsl_says_so(tmp_path: Path) -> None:
    assert not host_memory.in_wsl(tmp_path)
    release = tmp_path / "proc/sys/kernel/osrelease"
    release.parent.mkdir(parents=True)
    release.write_text("6.8.0-49-generic\n", encoding="utf-8")
    assert not host_memory.in_wsl(tmp_path)
    release.write_text("5.15.167.4-microsoft-standard-WSL2\n", encoding="utf-8")
    assert host_memory.in_wsl(tmp_path)


def test_memory_within_a_control_group(tmp_path: Path) -> None:
    """Of version 2: the tightest of the process's group and those above it counts."""
    files: dict[str, int | str] = {
        "jobs__memory.max": 6 * GIB,
        "jobs__memory.current": 5 * GIB,
        "jobs__memory.stat": f"anon 5\ninactive_file {GIB}\n",
        "jobs__mine__memory.max": "max",
        "jobs__mine__memory.current": GIB,
    }
    assert host_memory.left_bytes(system(tmp_path, group="0::/jobs/mine\n", **files)) == 2 * GIB


def test_memory_within_a_control_group_of_version_1(tmp_path: Path) -> None:
    files: dict[str, int | str] = {
        "memory__memory.limit_in_bytes": 2**63 - 4096,
        "memory__memory.usage_in_bytes": 50 * GIB,
        "memory__jobs__memory.limit_in_bytes": 2 * GIB,
        "memory__jobs__memory.usage_in_bytes": GIB,
    }
    group = "5:cpu:/other\n4:memory:/jobs\n0::/\n"
    assert host_memory.left_bytes(system(tmp_path, group=group, **files)) == GIB
