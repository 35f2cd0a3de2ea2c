"""Measures what recording costs a training outside of its profiled steps.

    python benchmarks/attach_overhead.py [--device cuda] [--runs 10]

Two ways: whole runs of a script that times its own steps, alternately with and without the recorder; and
blocks of steps in one process, alternately with and without the recorder's hooks, which excludes what differs from
process to process: `--runs 0` measures blocks only. On a CPU blocks are in the process's own time, which others on the
machine change less. Empty steps are those of an optimizer that does nothing: what is left are the hooks. The start is
the time until a script has imported torch, and that of `python -c pass`. Differences are medians of pairs, ± half of
their 95 % interval.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from math import ceil, floor
from pathlib import Path
from statistics import NormalDist, median
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from overlap_sweep.program import environment_with_recorder
from overlap_sweep.recorder.recording import Wanted
from overlap_sweep.recorder.step_recorder import StepRecorder

WARM_UP = 30
BLOCKS = 300
"""Blocks of each kind in one process."""
WIDTHS = {"cpu": {"short": (96, 24), "long": (512, 192)}, "cuda": {"short": (256, 256), "long": (8192, 4096)}}
"""Width of the model and number of samples, by device and length of the steps."""
EMPTY = "empty"
SECONDS = 3.0
"""Time of the timed steps of one run, and of all blocks."""
STARTS = 100
"""Pairs of starts of Python."""
LAYERS = 6
STARTED = "ATTACH_OVERHEAD_STARTED"


class Empty(torch.optim.Optimizer):
    def step(self, closure: Any = None) -> None:
        pass


def training(device: str, length: str) -> Callable[[], None]:
    """Returns a step of a training."""
    if length == EMPTY:
        return Empty([torch.zeros(1, device=device)], {}).step
    width, samples = WIDTHS[device][length]
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=device == "cuda")
    batch = torch.randn(samples, width, device=device)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


def timed_us(step: Callable[[], None], steps: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Returns the mean time of a step; a GPU is waited for at the end only."""
    wait = torch.cuda.synchronize if torch.cuda.is_initialized() else (lambda: None)
    wait()
    start = clock()
    for _ in range(steps):
        step()
    wait()
    return (clock() - start) / steps * 1e6


def script(device: str, length: str, steps: int) -> None:
    """Times its own steps, which it prints, with the time until torch was imported."""
    start_s = time.time() - float(os.environ[STARTED])
    torch.set_num_threads(1)
    step = training(device, length)
    timed_us(step, WARM_UP)
    print(json.dumps({"step_us": timed_us(step, steps), "start_s": start_s}))


def blocks(device: str, length: str, steps: int) -> None:
    """Prints times of steps with and without hooks, in pairs."""
    torch.set_num_threads(1)
    clock = time.process_time if device == "cpu" else time.perf_counter
    step, pairs = training(device, length), []
    timed_us(step, WARM_UP)
    recorder = StepRecorder(Wanted(directory=tempfile.gettempdir(), skip_steps=1, steps=100_000, profile_steps=0))
    after = torch.compiler.disable(recorder.after_optimizer)

    def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        after(optimizer)

    for block in range(BLOCKS):
        pair = {}
        # Neither is always first.
        for hooked in (block % 2 == 0, block % 2 == 1):
            handle = register_optimizer_step_post_hook(hook) if hooked else None
            pair[hooked] = timed_us(step, steps, clock)
            if handle:
                handle.remove()
        pairs.append((pair[True], pair[False]))
    print(json.dumps(pairs))


def child(words: Sequence[str], wanted: Wanted | None = None) -> Any:
    environment = {**environment_of(wanted), STARTED: str(time.time())}
    ran = subprocess.run(
        [sys.executable, __file__, *words], env=environment, text=True, stdout=subprocess.PIPE, check=True
    )
    return json.loads(ran.stdout.splitlines()[-1])


def environment_of(wanted: Wanted | None) -> Mapping[str, str]:
    return environment_with_recorder({**os.environ, **wanted.as_environment()}) if wanted else os.environ


def start_ms(wanted: Wanted | None) -> float:
    """Returns the time of a Python that imports nothing."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], env=environment_of(wanted), check=True)
    return (time.perf_counter() - start) * 1e3


def difference(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Returns the median difference of pairs, and half of its 95 % interval, by order statistics: others on the machine
    make some pairs differ by far."""
    differences = sorted(one - other for one, other in pairs)
    middle, away = (len(differences) - 1) / 2, NormalDist().inv_cdf(0.975) * len(differences) ** 0.5 / 2
    low, high = max(0, floor(middle - away)), min(len(differences) - 1, ceil(middle + away))
    return median(differences), (differences[high] - differences[low]) / 2


def row(name: str, length: str, pairs: Sequence[tuple[float, float]]) -> str:
    without_us = median(without for _, without in pairs)
    gap_us, noise_us = difference(pairs)
    share, noise = 100 * gap_us / without_us, 100 * noise_us / without_us
    return (
        f"| {name} | {length} | {len(pairs)} | {without_us:,.0f} | {gap_us:+.1f} ± {noise_us:.1f} | "
        f"{share:+.2f} ± {noise:.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--runs", type=int, default=10, help="pairs of runs; 0: blocks only")
    parser.add_argument("--mode", choices=["script", "blocks"], help="what the runs themselves do")
    parser.add_argument("--length", choices=["short", "long", EMPTY], default="short")
    parser.add_argument("--steps", type=int, default=0)
    options = parser.parse_args()
    if options.runs < 0:
        parser.error(f"--runs {options.runs}: give 0 or more pairs")
    if options.mode:
        {"script": script, "blocks": blocks}[options.mode](options.device, options.length, options.steps)
        return
    print(
        "| measured | steps | pairs | step us | difference us | difference % |", "|---|---|---|---|---|---|", sep="\n"
    )
    starts: list[tuple[float, float]] = []
    for length in ("short", "long"):
        words = ["--device", options.device, "--length", length]
        once = child([*words, "--mode", "script", "--steps", "50"])["step_us"]
        steps = max(50, round(SECONDS * 1e6 / once))
        if options.runs:
            found = list(runs([*words, "--mode", "script", "--steps", str(steps)], options.runs, steps))
            starts += [(one["start_s"], other["start_s"]) for one, other in found]
            print(row("runs", length, [(one["step_us"], other["step_us"]) for one, other in found]), flush=True)
        of_blocks = child([*words, "--mode", "blocks", "--steps", str(max(3, steps // BLOCKS))])
        print(row("blocks", length, of_blocks), flush=True)
    empty = child(["--device", options.device, "--length", EMPTY, "--mode", "blocks", "--steps", "200"])
    print(row("blocks", EMPTY, empty), flush=True)
    wanted = Wanted(directory=tempfile.gettempdir())
    gap_ms, noise_ms = difference([(start_ms(wanted), start_ms(None)) for _ in range(STARTS)])
    print(f"\n`python -c pass`: recording adds {gap_ms:.2f} ± {noise_ms:.2f} ms.")
    if not starts:
        return
    gap_s, noise_s = difference(starts)
    without_s = median(without for _, without in starts)
    print(f"\nStart: {without_s:.2f} s until torch is imported; recording adds {gap_s:.3f} ± {noise_s:.3f} s.")


def runs(words: Sequence[str], pairs: int, steps: int) -> Any:
    """Yields what attached runs and others printed, in pairs."""
    for pair in range(pairs):
        printed: dict[bool, Mapping[str, float]] = {}
        for attached in (pair % 2 == 0, pair % 2 == 1):
            with tempfile.TemporaryDirectory() as folder:
                few = Wanted(directory=folder, skip_steps=5, steps=steps + WARM_UP - 10, profile_steps=0)
                printed[attached] = child(words, few if attached else None)
                # A difference of nothing would prove nothing.
                assert bool(list(Path(folder).iterdir())) is attached
        yield printed[True], printed[False]


if __name__ == "__main__":
    main()
