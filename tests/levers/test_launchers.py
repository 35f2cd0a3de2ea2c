"""How many training processes a command starts, for commands as programs' documentation has them."""

import shlex
from pathlib import Path

import pytest

from overlap_sweep.levers.launchers import started_processes

TEXTS = {"ds.yaml": "distributed_type: DEEPSPEED\nnum_machines: 1\nnum_processes: 8\n", "ask.yaml": "num_machines: 1\n"}


@pytest.mark.parametrize(
    ("command", "processes"),
    [
        ("torchrun --nproc-per-node=8 train.py", 8),
        ("torchrun --standalone --nproc_per_node 4 train.py config/train_gpt2.py --batch_size=32", 4),
        ("/opt/env/bin/torchrun --nnodes=2 --nproc-per-node=8 --node-rank=0 --master-addr=a pretrain_gpt.py", 16),
        ("torchrun --nnodes 2:2 --nproc-per-node 8 --rdzv-backend=c10d -m torchtitan.train --x", 16),
        ("torchrun --nproc-per-node=2 train.py --nproc-per-node=3 -n 5", 2),
        ("torchrun --nproc-per-node=2 --no-python trl sft --n 4", 2),
        ("python -m torch.distributed.run --nproc-per-node=2 train.py", 2),
        ("python -m torch.distributed.launch --nproc_per_node=8 --use_env main.py --data-path d", 8),
        ("accelerate launch --multi_gpu --num_machines 2 --machine_rank 0 --num_processes 16 nlp_example.py", 16),
        ("accelerate launch --config_file ds.yaml sft.py --num_processes 3", 8),
        ("accelerate launch --config_file ds.yaml --num_processes 4 sft.py", 4),
        ("python -m accelerate.commands.launch --num-processes=2 train.py", 2),
        ("deepspeed --num_gpus=8 run_translation.py --deepspeed ds_config.json", 8),
        ("deepspeed --hostfile=hosts --num_nodes=2 --num_gpus 4 train.py --deepspeed_config ds.json", 8),
        ("mpirun -np 16 -H server1:8,server2:8 -bind-to none -x NCCL_DEBUG=INFO python train.py", 16),
        ("mpiexec -n 2 python -m train -n 4", 2),
        ("srun -n 8 --gres=gpu:8 python train.py", 8),
        ("srun -n8 -N2 python train.py", 8),
        ("srun --ntasks=4 singularity exec --nv image.sif python train.py", 4),
        ("srun --nodes=2 --ntasks-per-node=8 --kill-on-bad-exit=1 python -u tools/train.py --launcher slurm", 16),
        ("srun --ntasks 2 torchrun --nnodes 2 --nproc_per_node 4 --rdzv_backend c10d multinode_torchrun.py 50 10", 8),
        ("env NCCL_DEBUG=INFO OMP_NUM_THREADS=1 torchrun --nproc-per-node=2 train.py", 2),
        ("conda run -n 3 torchrun --nproc-per-node=2 train.py", 2),
        ("nsys profile -o trace torchrun --nproc-per-node=2 train.py", 2),
        ("bash -c 'OMP_NUM_THREADS=1 torchrun --nproc-per-node=2 train.py --x \"a b\" 2> log'", 2),
        ("bash -c 'export A=1 B=2; export C=\"3 4\" && torchrun --nproc-per-node=2 train.py'", 2),
        ("mpirun -np 4 bash -c 'exec python train.py -n 3'", 4),
        # The number is that of GPUs, of an allocation, of a file, or what the script does itself.
        ("torchrun --nproc-per-node=gpu train.py", None),
        ("torchrun --nproc-per-node auto train.py", None),
        ("torchrun --nproc-per-node=$GPUS train.py", None),
        ("torchrun --nnodes=1:4 --nproc-per-node=8 train.py", None),
        ("torchrun train.py", None),
        ("accelerate launch nlp_example.py", None),
        ("accelerate launch --config_file ask.yaml sft.py", None),
        ("accelerate launch --config_file none.yaml sft.py", None),
        ("deepspeed train.py --deepspeed_config ds.json", None),
        ("deepspeed --hostfile hosts --num_gpus 4 train.py", None),
        ("deepspeed --include localhost:0,1 train.py", None),
        ("srun python train.py -n 4", None),
        ("srun --ntasks-per-node=8 python train.py", None),
        ("srun -n 2 bash run.sh", None),
        ("bash -c 'cd x && torchrun --nproc-per-node=2 train.py'", None),
        ("bash run.sh --nproc-per-node=2", None),
        ("./run_train.sh", None),
        ("python train.py --launcher torchrun --nproc-per-node 2", None),
        ("conda run -n 3 python train.py", None),
        ("python train.py", None),
    ],
)
def test_the_launcher_next_to_the_script_says_how_many(command: str, processes: int | None) -> None:
    assert started_processes(shlex.split(command), TEXTS) == processes


@pytest.mark.parametrize(
    ("script", "processes"),
    [
        (
            "set -e\nexport A=1\ntorchrun --standalone \\\n  --nproc-per-node=4 train.py  # ours\n",
            4,
        ),
        ("torchrun --nproc-per-node=$GPUS train.py", None),
        ("torchrun --nproc-per-node=2 a.py\ntorchrun --nproc-per-node=4 b.py", None),
        ("echo it's\npython train.py", None),
    ],
)
def test_a_script_of_a_shell_is_read(script: str, processes: int | None, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(script)
    assert started_processes(["bash", str(tmp_path / "run.sh")], {}) == processes
    assert started_processes(["bash", str(tmp_path / "none.sh")], {}) is None
