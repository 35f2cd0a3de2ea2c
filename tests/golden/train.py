"""A small training under DistributedDataParallel, which record.sh sweeps as a user's own."""

import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--bucket-cap-mb", type=float, default=25.0)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [torch.nn.Linear(options.size, options.size) for _ in range(4)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=options.bucket_cap_mb)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(1000):
        model(torch.randn(64, options.size)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
