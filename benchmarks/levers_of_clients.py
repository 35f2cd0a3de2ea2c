"""Tries levers in small trainings of several frameworks, none of which knows of them, on a CPU with gloo:

    python benchmarks/levers_of_clients.py OUT [--only CLIENT,...]

For each client and lever a reference and the lever are measured by `launch.py`, and a table says whether it was
applied, in force, and with equal results. The clients' packages must be importable; others are left out.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

HEAD = """
import torch, torch.distributed as dist
from torch import nn

torch.manual_seed(0)


def model():
    return nn.Sequential(*[nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)) for _ in range(4)])


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, i):
        return torch.full((256,), (i % 7) / 7)


def loss_of(out):
    return out.square().mean()
"""

LOOP = """
loader = torch.utils.data.DataLoader(Data(), batch_size=16)
optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
for x in loader:
    loss = loss_of(wrapped(x))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""

CLIENTS = {
    "ddp": (
        "torch",
        'dist.init_process_group("gloo")\nwrapped = nn.parallel.DistributedDataParallel(model())\n' + LOOP,
        "torchrun",
    ),
    "fsdp2": (
        "torch",
        'dist.init_process_group("gloo")\n'
        "from torch.distributed.fsdp import fully_shard\n"
        "wrapped = model()\n"
        "for unit in wrapped:\n    fully_shard(unit)\n"
        "fully_shard(wrapped)\n" + LOOP,
        "torchrun",
    ),
    "accumulating ddp": (
        "torch",
        'dist.init_process_group("gloo")\n'
        "wrapped = nn.parallel.DistributedDataParallel(model())\n"
        "loader = torch.utils.data.DataLoader(Data(), batch_size=16)\n"
        "optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)\n"
        "for i, x in enumerate(loader):\n"
        "    loss_of(wrapped(x)).backward()\n"
        "    if i % 2:\n        optimizer.step()\n        optimizer.zero_grad()\n",
        "torchrun",
    ),
    "accelerate": (
        "accelerate",
        "from accelerate import Accelerator\n"
        "accelerator = Accelerator(cpu=True)\n"
        "wrapped = model()\n"
        "loader = torch.utils.data.DataLoader(Data(), batch_size=16)\n"
        "optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)\n"
        "wrapped, optimizer, loader = accelerator.prepare(wrapped, optimizer, loader)\n"
        "for x in loader:\n"
        "    accelerator.backward(loss_of(wrapped(x)))\n    optimizer.step()\n    optimizer.zero_grad()\n",
        "torchrun",
    ),
    "transformers": (
        "transformers",
        "from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments\n"
        "class Tokens(Data):\n"
        "    def __getitem__(self, i):\n"
        "        tokens = torch.arange(i, i + 32) % 64\n"
        "        return {'input_ids': tokens, 'labels': tokens}\n"
        "(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()\n"
        "made = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=64, n_embd=128, n_layer=3, n_head=4))\n"
        "Trainer(made, arguments, train_dataset=Tokens()).train()\n",
        "torchrun",
    ),
    "lightning": (
        "lightning",
        "import lightning\n"
        "class Module(lightning.LightningModule):\n"
        "    def __init__(self):\n        super().__init__()\n        self.own = model()\n"
        "    def training_step(self, x, i):\n        return loss_of(self.own(x))\n"
        "    def configure_optimizers(self):\n        return torch.optim.AdamW(self.parameters(), lr=1e-3)\n"
        "lightning.Trainer(accelerator='cpu', devices=2, strategy='ddp', max_steps=1000, logger=False,\n"
        "    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False).fit(\n"
        "    Module(), torch.utils.data.DataLoader(Data(), batch_size=16))\n",
        "python",
    ),
}
ARGUMENTS = {
    "transformers": "--output_dir {run}/out --use_cpu --per_device_train_batch_size 4 --max_steps 1000 --report_to none"
}

LEVERS = {
    "ddp.bucket_cap_mb": 1,
    "ddp.static_graph": True,
    "ddp.gradient_as_bucket_view": True,
    "ddp.no_sync": True,
    "fsdp2.prefetch": 2,
    "fsdp2.reshard_after_forward": False,
    "loader.num_workers": 1,
    "optimizer.fused": True,
    "host.collect_every": 10,
    "host.compile_blocks": True,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default=",".join(CLIENTS))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for client in given.only.split(","):
        package, script, launcher = CLIENTS[client]
        if importlib.util.find_spec(package) is None:
            print(f"{client}: {package} is not installed")
            continue
        path = given.out / f"train_{client.replace(' ', '_')}.py"
        # A spawned process, such as a loader's worker, imports the script again.
        body = "".join(f"    {line}\n" for line in script.splitlines())
        path.write_text(f"{HEAD}\nif __name__ == '__main__':\n{body}")
        start = f"torchrun --nproc-per-node={{ranks}} {path}" if launcher == "torchrun" else f"{sys.executable} {path}"
        sweep = given.out / client.replace(" ", "_")
        command = f"{start} {ARGUMENTS.get(client, '')}"
        launch(sweep, command, ["repetition=0,1"])
        for lever, value in LEVERS.items():
            launch(sweep, command, [f"+job.levers.{lever}={str(value).lower() if isinstance(value, bool) else value}"])
        for lever in LEVERS:
            print(f"{client:18} {lever:30} {found(sweep, lever)}", flush=True)
    return 0


def launch(sweep: Path, command: str, more: list[str]) -> None:
    """Measures into the sweep's folder."""
    options = ["workload=job", "runtime.device=cpu", "job.ranks=2", f"job.command={command}"]
    steps = ["job.skip_steps=3", "job.steps=3", "job.profile_steps=3"]
    call = [sys.executable, "launch.py", "-m", *options, *steps, *more, f"hydra.sweep.dir={sweep}"]
    done = subprocess.run(call, capture_output=True, text=True)
    with sweep.with_suffix(".log").open("a") as log:
        log.write(done.stdout + done.stderr)


def found(sweep: Path, lever: str) -> str:
    """Returns what became of a lever."""
    family, _, name = lever.partition(".")
    results = [json.loads(path.read_text()) for path in sorted(sweep.glob("*/result.json"))]
    changed = [one for one in results if family in one["point"]["job"]["levers"]]
    changed = [one for one in changed if name in one["point"]["job"]["levers"][family]]
    if not changed:
        return f"no result, see {sweep.with_suffix('.log')}"
    if changed[0]["status"] != "ok":
        return f"{changed[0]['status']}: {changed[0]['error'].partition(': ')[2] or changed[0]['error']}"
    (case,) = json.loads((sweep / "tuning_report.json").read_text())["jobs"]
    own = next(one for one in case["settings"] if f"job.levers.{lever}" in one["options"])
    reference = next(sweep / one["name"] for one in results if not one["point"]["job"]["levers"])
    asked = [sys.executable, "analyze.py", "effect", sweep / changed[0]["name"], "--against", reference]
    effect = json.loads(subprocess.check_output([*asked, "--format", "json"]))
    verdicts = ", ".join(one["verdict"] for one in effect["settings"])
    aspects = ", ".join({one["aspect"]: 0 for one in effect["differences"]}) or "nothing changed"
    return f"applied; {verdicts} ({aspects}); results {own.get('results') or '-'}"


if __name__ == "__main__":
    sys.exit(main())
