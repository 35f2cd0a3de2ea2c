"""Tries levers in small trainings of several frameworks, none of which knows of them, on a CPU with gloo:

    python benchmarks/levers_of_clients.py OUT [--only CLIENT,...] [--by-hand]

For each client and lever a reference and the lever are measured by `launch.py`, and a table says whether it was
applied, in force, and with equal results; of a program's option also whether a run in whose command it is written by
hand does the same. The clients' packages and launchers must be there, others are left out; DeepSpeed's needs
DS_ACCELERATOR=cpu.
"""

import argparse
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from overlap_sweep.levers import levers as known

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

IN_PROCESS = (
    "ddp.bucket_cap_mb=1",
    "ddp.static_graph=true",
    "ddp.gradient_as_bucket_view=true",
    "ddp.no_sync=true",
    "fsdp2.prefetch=2",
    "fsdp2.reshard_after_forward=false",
    "loader.num_workers=1",
    "optimizer.fused=true",
    "host.collect_every=10",
    "host.compile_blocks=true",
)
OF_HOST = IN_PROCESS[-4:]
APPLIED = "applied"
TRAINER_SCRIPT = (
    "from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments\n"
    "class Tokens(Data):\n"
    "    def __getitem__(self, i):\n"
    "        tokens = torch.arange(i, i + 32) % 64\n"
    "        return {'input_ids': tokens, 'labels': tokens}\n"
    "(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()\n"
    "made = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=64, n_embd=128, n_layer=3, n_head=4))\n"
    "Trainer(made, arguments, train_dataset=Tokens()).train()\n"
)
ACCELERATE_SCRIPT = (
    "from accelerate import Accelerator\n"
    "accelerator = Accelerator(cpu=True)\n"
    "wrapped = model()\n"
    "loader = torch.utils.data.DataLoader(Data(), batch_size=16)\n"
    "optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)\n"
    "wrapped, optimizer, loader = accelerator.prepare(wrapped, optimizer, loader)\n"
    "for x in loader:\n"
    "    accelerator.backward(loss_of(wrapped(x)))\n    optimizer.step()\n    optimizer.zero_grad()\n"
)
DEEPSPEED_SCRIPT = (
    "import argparse\n"
    "import deepspeed\n"
    "class Block(nn.Module):\n"
    "    def __init__(self):\n"
    "        super().__init__()\n        self.up, self.down = nn.Linear(256, 512), nn.Linear(512, 256)\n"
    "    def forward(self, x):\n        return self.down(nn.functional.gelu(self.up(x)))\n"
    "parser = deepspeed.add_config_arguments(argparse.ArgumentParser())\n"
    "parser.add_argument('--local_rank', type=int)\n"
    "arguments = parser.parse_args()\n"
    "deepspeed.init_distributed('gloo')\n"
    "wrapped = nn.Sequential(*[Block() for _ in range(4)])\n"
    "loader = torch.utils.data.DataLoader(Data(), batch_size=16)\n"
    "optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)\n"
    "engine, *_ = deepspeed.initialize(arguments, wrapped, optimizer)\n"
    "for x in loader:\n"
    "    engine.backward(loss_of(engine(x)))\n    engine.step()\n"
)
TRAINER = "--output_dir {run}/out --use_cpu --per_device_train_batch_size 4 --max_steps 1000 --report_to none"


@dataclass(frozen=True)
class Client:
    """A training, how it is started, and the levers that are tried in it."""

    package: str
    script: str
    start: str = "torchrun --standalone --nproc-per-node={ranks}"
    arguments: str = ""
    deepspeed: Mapping[str, object] = field(default_factory=dict)
    """DeepSpeed's configuration, `{json}` in the arguments."""
    levers: Sequence[str] = IN_PROCESS
    """Name=value; several in one text are set together."""


ZERO = {"train_micro_batch_size_per_gpu": 16, "zero_allow_untested_optimizer": True}
DEEPSPEED = {
    "package": "deepspeed",
    "script": DEEPSPEED_SCRIPT,
    "start": "deepspeed --num_gpus {ranks} --master_port {port}",
    "arguments": "--deepspeed --deepspeed_config {json}",
}
BUCKETS = (
    "deepspeed.reduce_bucket_size=300000",
    "deepspeed.allgather_bucket_size=300000",
    "deepspeed.contiguous_gradients=false",
    "deepspeed.communication_data_type=bf16",
    "deepspeed.overlap_comm=true",
)

CLIENTS = {
    "ddp": Client(
        "torch",
        'dist.init_process_group("gloo")\nwrapped = nn.parallel.DistributedDataParallel(model())\n' + LOOP,
    ),
    "fsdp2": Client(
        "torch",
        'dist.init_process_group("gloo")\n'
        "from torch.distributed.fsdp import fully_shard\n"
        "wrapped = model()\n"
        "for unit in wrapped:\n    fully_shard(unit)\n"
        "fully_shard(wrapped)\n" + LOOP,
    ),
    "accumulating ddp": Client(
        "torch",
        'dist.init_process_group("gloo")\n'
        "wrapped = nn.parallel.DistributedDataParallel(model())\n"
        "loader = torch.utils.data.DataLoader(Data(), batch_size=16)\n"
        "optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)\n"
        "for i, x in enumerate(loader):\n"
        "    loss_of(wrapped(x)).backward()\n"
        "    if i % 2:\n        optimizer.step()\n        optimizer.zero_grad()\n",
    ),
    "accelerate": Client(
        "accelerate",
        ACCELERATE_SCRIPT,
    ),
    "transformers": Client(
        "transformers",
        TRAINER_SCRIPT,
        arguments=TRAINER,
    ),
    "lightning": Client(
        "lightning",
        "import lightning\n"
        "class Module(lightning.LightningModule):\n"
        "    def __init__(self):\n        super().__init__()\n        self.own = model()\n"
        "    def training_step(self, x, i):\n        return loss_of(self.own(x))\n"
        "    def configure_optimizers(self):\n        return torch.optim.AdamW(self.parameters(), lr=1e-3)\n"
        "lightning.Trainer(accelerator='cpu', devices=2, strategy='ddp', max_steps=1000, logger=False,\n"
        "    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False).fit(\n"
        "    Module(), torch.utils.data.DataLoader(Data(), batch_size=16))\n",
        start=sys.executable,
    ),
    "deepspeed zero1": Client(
        **DEEPSPEED, deepspeed=ZERO | {"zero_optimization": {"stage": 1}}, levers=(*BUCKETS, *OF_HOST)
    ),
    "deepspeed zero2": Client(
        **DEEPSPEED, deepspeed=ZERO | {"zero_optimization": {"stage": 2}}, levers=(*BUCKETS, *OF_HOST)
    ),
    "deepspeed zero3": Client(
        **DEEPSPEED,
        deepspeed=ZERO | {"zero_optimization": {"stage": 3}},
        levers=(
            *BUCKETS,
            "deepspeed.stage3_prefetch_bucket_size=100000",
            "deepspeed.stage3_param_persistence_threshold=1000000",
            "deepspeed.stage3_max_live_parameters=200000",
            *OF_HOST,
        ),
    ),
    "accelerate launch": Client(
        "accelerate",
        ACCELERATE_SCRIPT,
        "accelerate launch --multi_gpu --num_processes {ranks} --main_process_port {port}",
        levers=(
            "accelerate.num_cpu_threads_per_process=2",
            "accelerate.fsdp_forward_prefetch=true",
            "ddp.bucket_cap_mb=1",
        ),
    ),
    "trainer's options": Client(
        "transformers",
        TRAINER_SCRIPT,
        arguments=TRAINER,
        levers=(
            "transformers.ddp_bucket_cap_mb=1",
            "transformers.ddp_find_unused_parameters=false",
            "transformers.ddp_static_graph=true",
            "transformers.ddp_broadcast_buffers=false",
            "transformers.dataloader_num_workers=1",
            "transformers.dataloader_prefetch_factor=4",
            "transformers.dataloader_num_workers=1 transformers.dataloader_prefetch_factor=4",
            "transformers.gradient_accumulation_steps=2",
            "transformers.average_tokens_across_devices=false",
            "transformers.logging_nan_inf_filter=false",
            "transformers.torch_compile=true",
            "transformers.optim=adamw_torch_fused",
            "transformers.optim=adamw_torch",
        ),
    ),
    "trainer deepspeed": Client(
        "deepspeed",
        TRAINER_SCRIPT,
        arguments=TRAINER + " --deepspeed {json}",
        deepspeed={
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "contiguous_gradients": True},
        },
        levers=(
            "deepspeed.reduce_bucket_size=300000",
            "deepspeed.contiguous_gradients=false",
            "transformers.gradient_accumulation_steps=2",
            "transformers.ddp_bucket_cap_mb=1",
        ),
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default=",".join(CLIENTS))
    parser.add_argument("--by-hand", action="store_true", help="also write each program's option by hand, and compare")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for name in given.only.split(","):
        client = CLIENTS[name]
        if importlib.util.find_spec(client.package) is None:
            print(f"{name}: {client.package} is not installed")
            continue
        sweep = (given.out / name.replace(" ", "_").replace("'", "")).absolute()
        script, settings = sweep.with_suffix(".py"), sweep.with_suffix(".json")
        # A spawned process, such as a loader's worker, imports the script again.
        body = "".join(f"    {line}\n" for line in client.script.splitlines())
        script.write_text(f"{HEAD}\nif __name__ == '__main__':\n{body}")
        settings.write_text(json.dumps(client.deepspeed))
        arguments = client.arguments.replace("{json}", str(settings))
        command = f"{client.start} {script} {arguments}"
        launch(sweep, command, "repetition=0,1")
        for levers in client.levers:
            launch(sweep, command, *(f"+job.levers.{lever}" for lever in levers.split()))
        for levers in client.levers:
            text = found(sweep, levers)
            if given.by_hand and text.startswith(APPLIED) and all(option(lever) for lever in levers.split()):
                text += f"; by hand, against the lever: {by_hand(sweep, levers, client, command)}"
            print(f"{name:18} {levers:45} {text}", flush=True)
    return 0


def launch(sweep: Path, command: str, *more: str) -> None:
    """Measures into the sweep's folder."""
    options = ["workload=job", "runtime.device=cpu", "job.ranks=2", f"job.command={command}"]
    steps = ["job.skip_steps=3", "job.steps=3", "job.profile_steps=3"]
    call = [sys.executable, "launch.py", "-m", *options, *steps, *more, f"hydra.sweep.dir={sweep}"]
    done = subprocess.run(call, capture_output=True, text=True)
    with sweep.with_suffix(".log").open("a") as log:
        log.write(done.stdout + done.stderr)


def result_of(sweep: Path, levers: str = "") -> dict[str, Any] | None:
    """Returns the first result with these levers and no others; None if there is none."""
    results = [json.loads(path.read_text()) for path in sorted(sweep.glob("*/result.json"))]
    return next((one for one in results if typed(values(one)) == set(levers.split())), None)


def values(result: dict[str, Any]) -> dict[str, Any]:
    """Returns the levers of a result, by name."""
    families = result["point"]["job"]["levers"].items()
    return {f"{family}.{name}": value for family, own in families for name, value in own.items()}


def typed(levers: Mapping[str, Any]) -> set[str]:
    return {f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in levers.items()}


def found(sweep: Path, levers: str) -> str:
    """Returns what became of the levers."""
    changed, reference = result_of(sweep, levers), result_of(sweep)
    if not changed or not reference:
        return f"no result, see {sweep.with_suffix('.log')}"
    if changed["status"] != "ok":
        return f"{changed['status']}: {changed['error'].partition(': ')[2] or changed['error']}"
    (case,) = json.loads((sweep / "tuning_report.json").read_text())["jobs"]
    wanted = {f"job.levers.{lever}" for lever in levers.split()}
    own = next(one for one in case["settings"] if typed(one["options"]) == wanted)
    effect = effect_of(sweep / changed["name"], sweep / reference["name"])
    verdicts = ", ".join(one["verdict"] for one in effect["settings"])
    return f"{APPLIED}; {verdicts} ({aspects(effect)}); results {own.get('results') or '-'}"


def effect_of(after: Path, before: Path) -> dict[str, Any]:
    asked = [sys.executable, "analyze.py", "effect", str(after), "--against", str(before), "--format", "json"]
    effect: dict[str, Any] = json.loads(subprocess.check_output(asked))
    return effect


def aspects(effect: dict[str, Any]) -> str:
    return ", ".join({one["aspect"]: 0 for one in effect["differences"]}) or "nothing changed"


def option(lever: str) -> str:
    """Returns the option of a program that the lever is; empty for others."""
    return known()[lever.partition("=")[0]].argument


def by_hand(sweep: Path, levers: str, client: Client, command: str) -> str:
    """Returns what runs otherwise than with the levers where their options are written by hand."""
    changed, settings = result_of(sweep, levers), dict(client.deepspeed)
    assert changed
    for name, value in values(changed).items():
        lines = known()[name].written(value)
        if name.startswith("deepspeed."):
            settings = merged(settings, json.loads(lines))
        elif name.startswith("accelerate."):
            command = command.replace("accelerate launch ", f"accelerate launch {lines} ")
        else:
            command += f" {lines}"
    own = sweep.with_name(f"{sweep.name}_by_hand") / re.sub(r"\W+", "_", levers)
    own.mkdir(parents=True)
    file = own / "by_hand.json"
    file.write_text(json.dumps(settings))
    launch(own, command.replace(str(sweep.with_suffix(".json")), str(file)))
    result = result_of(own)
    if not result or result["status"] != "ok":
        return f"no result, see {own.with_suffix('.log')}"
    return aspects(effect_of(own / result["name"], sweep / changed["name"]))


def merged(settings: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    both = {name: merged(settings[name], more[name]) for name in settings if isinstance(more.get(name), dict)}
    return {**settings, **more, **both}


if __name__ == "__main__":
    sys.exit(main())
