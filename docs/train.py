"""A small training under DistributedDataParallel, as any: what jobs.md measures without changing it."""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--bucket-cap-mb", type=float, default=25.0)
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(options.size, options.size), torch.nn.GELU()) for _ in range(8)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers).to(device), bucket_cap_mb=options.bucket_cap_mb)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(options.steps):
        loss = model(torch.randn(options.batch, options.size, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0 and dist.get_rank() == 0:
            print(f"step {step}, loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
