"""Lets `overlap-sweep optimize` loose on small trainings, and tries all that it could have tried, on a CPU with gloo:

    python benchmarks/optimize_clients.py OUT [--only CLIENT,...]

A sweep by launch tries the same values of levers, each alone and in three runs that take turns, then all pairs of what
helped. A table says how far what optimize chose is from the best of it, by the sweep's own times: the regret. Clients
whose packages are not installed are left out; what optimize has said in OUT is not asked again.
"""

import argparse
import importlib.util
import itertools
import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import indent

import msgspec

from overlap_sweep import optimize
from overlap_sweep.hydra_adapter.overrides import override_value
from overlap_sweep.levers import OPTION
from overlap_sweep.levers.programs import text
from overlap_sweep.optimizer.answer import Answer
from overlap_sweep.optimizer.candidates import Allowed
from overlap_sweep.results.measured import Scalar
from overlap_sweep.results.records import KnobRecord

REPETITIONS = range(3)
QUICK = ["runtime.device=cpu", "job.skip_steps=2", "job.steps=8", "job.profile_steps=2"]

HEAD = """
import time, torch, torch.distributed as dist, torch.nn as nn
from torch.utils.data import DataLoader
torch.manual_seed(0)
def model(width, layers):
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)])
class Data(torch.utils.data.Dataset):
    def __init__(self, width, read_ms=0.0):
        self.width, self.read_ms = width, read_ms
    def __len__(self):
        return 100_000
    def __getitem__(self, i):
        time.sleep(self.read_ms / 1e3)
        return torch.full((self.width,), (i % 7) / 7)
def train(wrapped, loader):
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
    for x in loader:
        wrapped(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
# One bucket, so that no reduction overlaps with the backward pass, and a search of the graph that finds nothing.
DDP = """
dist.init_process_group("gloo")
wrapped = nn.parallel.DistributedDataParallel(model(1024, 8), bucket_cap_mb=1000, find_unused_parameters=True)
train(wrapped, DataLoader(Data(1024), batch_size=64))
"""
# Reading a sample takes 3 ms, in the process that trains.
LOADER = """dist.init_process_group("gloo")
train(nn.parallel.DistributedDataParallel(model(512, 4)), DataLoader(Data(512, read_ms=3), batch_size=32))"""
# Parameters that would fit are gathered again for the backward pass.
FSDP2 = """
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
wrapped = model(1024, 8)
for unit in [*wrapped, wrapped]:
    fully_shard(unit, reshard_after_forward=True)
train(wrapped, DataLoader(Data(1024), batch_size=32))
"""
ONE_PROCESS = """blocks = nn.TransformerEncoder(nn.TransformerEncoderLayer(128, 4, 512, 0.0, batch_first=True), 4)
train(blocks, DataLoader(torch.randn(100_000, 64, 128), batch_size=12))"""
ACCELERATE = """from accelerate import Accelerator
train(*Accelerator(cpu=True).prepare(model(1024, 8), DataLoader(Data(1024), batch_size=32)))"""
TRANSFORMERS = """
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments
class Tokens(Data):
    def __getitem__(self, i):
        tokens = torch.arange(i, i + 64) % 512
        return {"input_ids": tokens, "labels": tokens}
(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
made = GPT2LMHeadModel(GPT2Config(vocab_size=512, n_positions=64, n_embd=256, n_layer=4, n_head=4))
Trainer(made, arguments, train_dataset=Tokens(64)).train()
"""
TORCHRUN = "torchrun --standalone --nproc-per-node=2"
TRAINER = "--output_dir out --use_cpu --per_device_train_batch_size 8 --max_steps 1000 --report_to none"
CLIENTS = {
    "ddp": ("torch", DDP, TORCHRUN, ""),
    "loader": ("torch", LOADER, TORCHRUN, ""),
    "fsdp2": ("torch", FSDP2, TORCHRUN, ""),
    "one process": ("torch", ONE_PROCESS, sys.executable, ""),
    "accelerate": ("accelerate", ACCELERATE, TORCHRUN, ""),
    "transformers": ("transformers", TRANSFORMERS, TORCHRUN, TRAINER),
}
"""Package, script, what it is started by, and its arguments."""

Times = dict[frozenset[str], tuple[float, float]]
"""Time of a step and its noise in us, by the levers that are set."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default=",".join(CLIENTS))
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--allow", default="rounding")
    parser.add_argument("--levers", nargs="*", default=[], help="only these levers or families")
    parser.add_argument("--no-sweep", action="store_true", help="only optimize")
    given = parser.parse_args()
    rows = []
    for name in given.only.split(","):
        package, body, start, arguments = CLIENTS[name]
        if importlib.util.find_spec(package) is None:
            print(f"{name}: {package} is not installed", file=sys.stderr)
            continue
        folder = (given.out / name.replace(" ", "_")).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        # Not the name of the package, which the script would then import instead.
        script = folder.with_name(f"train_{folder.name}.py")
        # A spawned process, such as a loader's worker, imports the script again.
        script.write_text(f"{HEAD}if __name__ == '__main__':\n{indent(body, '    ')}\n")
        command = f"{start} {script} {arguments}".strip()
        answer = optimized(folder / given.allow, command, given.minutes, given.allow, given.levers)
        times = {} if given.no_sweep else swept(folder, given.allow, command)
        rows.append(f"| {name} | {given.allow} | {in_cells(answer, times)} |")
    print("| client | allow | as it is ms | says | expected most | minutes, runs | best of the sweep | regret |")
    print("|---|---|---|---|---|---|---|---|", *rows, sep="\n")
    return 0


def optimized(folder: Path, command: str, minutes: float, allow: Allowed, levers: Sequence[str]) -> Answer:
    saved = folder.with_suffix(".json")
    if not saved.exists():
        answer = optimize(command, minutes=minutes, allow=allow, levers=levers, output_dir=folder, overrides=QUICK)
        saved.write_bytes(msgspec.json.format(msgspec.json.encode(answer)))
    return msgspec.json.decode(saved.read_bytes(), type=Answer)


def swept(folder: Path, allow: Allowed, command: str) -> Times:
    """Measures each value alone, then the pairs of those that were faster beyond the noise."""
    (searched,) = KnobRecord.read(folder / allow / KnobRecord.FILE).searches
    sweep = folder / f"sweep_{allow}"
    # By repetition first, so that runs of a setting are spread over the whole time.
    for repetition in REPETITIONS:
        launch(sweep, command, f"repetition={repetition}")
        for key, (_, *values) in searched.knobs.items():
            launch(sweep, command, f"repetition={repetition}", f"+{key}={','.join(values)}")
    times = times_of(sweep)
    helped = [next(iter(one)) for one in times if len(one) == 1 and gain(times, one)[0] > gain(times, one)[1]]
    for both in itertools.combinations(helped, 2):
        if len({one.partition("=")[0] for one in both}) == 2:
            launch(sweep, command, "repetition=0,1,2", *(f"+{OPTION}{lever}" for lever in both))
    return times_of(sweep)


def launch(sweep: Path, command: str, *more: str) -> None:
    ranks = 2 if command.startswith(TORCHRUN) else 1
    options = ["workload=job", f"job.ranks={ranks}", f"job.command={override_value(command)}"]
    call = [sys.executable, "launch.py", "-m", *options, "job.levers_override=true", *QUICK, *more]
    with sweep.with_suffix(".log").open("a") as log:
        subprocess.run([*call, f"hydra.sweep.dir={sweep}"], stdout=log, stderr=log, check=False)


def times_of(sweep: Path) -> Times:
    (case,) = json.loads((sweep / "tuning_report.json").read_text())["jobs"]
    times: Times = {}
    for one in case["settings"]:
        levers = frozenset(f"{name.removeprefix(OPTION)}={text(value)}" for name, value in one["options"].items())
        times[levers] = one["time_us"], one["noise_us"]
    return times


def gain(times: Times, levers: frozenset[str]) -> tuple[float, float]:
    """Returns the share of the step that is gained over the command as it is, and its noise."""
    (base_us, base_noise_us), (time_us, noise_us) = times[frozenset()], times[levers]
    return 1 - time_us / base_us, math.hypot(base_noise_us, noise_us) / base_us


def in_cells(answer: Answer, times: Times) -> str:
    chosen = names_of(answer.settings)
    says = f"{in_words(chosen)}: {answer.gain:.1%} ± {(answer.high - answer.low) / 2:.1%}" if chosen else "keep it"
    known = [(one.expected, one.settings) for one in answer.trials if one.expected]
    most, levers = max(known, key=lambda one: one[0].gain, default=(None, {}))
    expected = f"{in_words(names_of(levers))}: {most.in_words}" if most else "nothing"
    cells = [f"{answer.step_us / 1e3:.1f}", says, expected, f"{answer.minutes:.1f}, {answer.runs}"]
    if not times:
        return " | ".join([*cells, "", ""])
    best = min(times, key=lambda one: times[one][0])
    share, noise = gain(times, best)
    cells.append(f"{in_words(best)}: {share:.1%} ± {noise:.1%}, of {len(times) - 1}")
    return " | ".join([*cells, f"{share - gain(times, chosen)[0]:.1%}" if chosen in times else "not in the sweep"])


def names_of(settings: Mapping[str, Scalar]) -> frozenset[str]:
    return frozenset(f"{name}={text(value)}" for name, value in settings.items())


def in_words(levers: frozenset[str]) -> str:
    return ", ".join(f"`{one}`" for one in sorted(levers)) or "as it is"


if __name__ == "__main__":
    sys.exit(main())
