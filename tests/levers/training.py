"""A training under DDP, FSDP2 or FSDP1, as any, without arguments for what levers change: training.py KIND [SIZE]

Tests put what levers.yaml says to write in the place of its lines.
"""

import contextlib  # noqa: F401, for lines to be written
import gc  # noqa: F401, as above
import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

KIND = sys.argv[1]
SIZE, BATCH = (int(sys.argv[2]), 512) if len(sys.argv) > 2 else (256, 16)
STEPS, MICROBATCHES = 16, 2
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if ON_GPU else torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(nn.functional.gelu(self.up(x)))
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(5)])
        self.head = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def loss(output: Tensor) -> Tensor:
    return output.square().mean()


if ON_GPU:
    torch.cuda.set_device(DEVICE)
dist.init_process_group("nccl" if ON_GPU else "gloo")
torch.manual_seed(0)
model: nn.Module = Model().to(DEVICE)
blocks = [*model.get_submodule("blocks").children()]
if KIND == "ddp":
    model = DistributedDataParallel(model)
elif KIND == "fsdp2":
    for unit in blocks:
        fully_shard(unit)
    fully_shard(model)
else:
    model = FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}))
units = blocks
# BEFORE THE FIRST STEP
parameters = model.parameters()
optimizer = AdamW(parameters)
torch.manual_seed(dist.get_rank())
dataset = TensorDataset(torch.randn(STEPS * MICROBATCHES * BATCH, SIZE))
batches = iter(DataLoader(dataset, batch_size=BATCH))
for step in range(STEPS):  # noqa: B007, for lines to be written
    microbatches = [next(batches)[0].to(DEVICE) for _ in range(MICROBATCHES)]
    for batch in microbatches:
        loss(model(batch)).backward()
    optimizer.step()
    optimizer.zero_grad()
    # AFTER EACH STEP
norm = torch.nn.utils.get_total_norm(model.parameters())
print(f"norm {float(norm.full_tensor() if isinstance(norm, DTensor) else norm):.6f}", flush=True)
dist.destroy_process_group()
