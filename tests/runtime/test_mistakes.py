"""What a wrong command line is answered by: one line that says what to type instead, and nothing is measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from overlap_sweep.errors import nearest
from overlap_sweep.runtime import point
from overlap_sweep.runtime.resolvers import point_name, register
from tests.sweeps import ROOT, launch_here

NUM_SM = "Unknown option num_smm. Did you mean num_sm?"
HELP = "See python launch.py --help."

HYDRAS = (
    "hydra.job.name=a,b: hydra.job.name takes one value; quote a value with commas, as in 'hydra.job.name=\"a,b\"'."
)


def several(override: str, typed: str, also: str = "") -> str:
    """The message about a sweep without -m, up to what the test adds."""
    rest = "runtime.device=cpu hydra.run.dir=DIR hydra.sweep.dir=DIR"
    return f"{override} has several values; add -m to sweep over them{also}: python launch.py -m {typed} {rest}"


MISTAKES = {
    # Options, however Hydra is asked to take them.
    "num_smm=8": NUM_SM,
    "+num_smm=8": NUM_SM,
    "++num_smm=8": NUM_SM,
    "~num_smm": NUM_SM,
    "~model": "model cannot be deleted; leave out ~model.",
    "-m num_smm=8,16": NUM_SM,
    "-m +num_smm=8,16": NUM_SM,
    "-m ++num_smm=8,16": NUM_SM,
    "-m +num_smm=8,16 hydra/launcher=slurm": NUM_SM,
    "-m +num_smm=8,16 hydra/launcher=submitit_slurm": NUM_SM,
    "-m +num_smm=8,16 hydra/launcher=basic": NUM_SM,
    "-m +num_smm=8,16 hydra/sweeper=bisect": NUM_SM,
    "-m +num_smm=8,16 hydra/sweeper=knobs workload=fsdp": NUM_SM,
    "-m +num_smm=8,16 +experiment=tp_overlap_tuner": NUM_SM,
    "-m +num_sm=8,16": "num_sm exists already; give num_sm=... without the +.",
    "tokens=8192": "Unknown option tokens. Did you mean workload.tokens?",
    "tp=8": "Unknown option tp. Did you mean tp_size?",
    "runtime.devise=cpu": "Unknown option runtime.devise. Did you mean runtime.device?",
    "workload=fsdp fsdp.forward_prefech=1": "Unknown option fsdp.forward_prefech. Did you mean fsdp.forward_prefetch?",
    "workload=job job.comand=x": "Unknown option job.comand. Did you mean job.command?",
    "workload=job +job.vales.x=1": "Unknown option job.vales.x. Did you mean +job.values.x?",
    "workload=job job.value.x=1": "Unknown option job.value.x. Did you mean +job.values.x?",
    "workload=job job.values.x=1": "job.values has no x; add it with +job.values.x=... .",
    "workload=job job.ranks=2": "job.command has no value; give job.command=... .",
    "-m workload=job +job.values.x=1,2": "job.command has no value; give job.command=... .",
    "-m workload=job hydra/sweeper=knobs +job.values.x=1,2": "job.command has no value; give job.command=... .",
    "-m workload=job hydra/sweeper=knobs job.command=x": (
        "There is nothing to search; give a knob several values, such as +job.values.bucket=25,100."
    ),
    "something=8": "Unknown option something. See python launch.py workload=<name> --help.",
    "m=0": "m requires workload=kernel.",
    "+hydra.foo=3": "Unknown option hydra.foo. Did you mean hydra.mode?",
    "+hydra.sweep.dirr=x": "Unknown option hydra.sweep.dirr. Did you mean hydra.sweep.dir?",
    "hydra.sweep.dirr=x": "Unknown option hydra.sweep.dirr. Did you mean hydra.sweep.dir?",
    "hydra/launcher=slurm hydra.launcher.partitoin=x": (
        "Unknown option hydra.launcher.partitoin. Did you mean hydra.launcher.partition?"
    ),
    # Groups and their choices.
    "num_sm=1.5": "num_sm=1.5 is not a whole number; give a value from 1 to 512.",
    "tp_size=true": "tp_size=true is not a whole number; give a value from 1 to 8.",
    "num_sm=null": "num_sm=null is not a whole number; give a value from 1 to 512.",
    "num_sm=[1,2]": "num_sm=[1,2] is not a whole number; give a value from 1 to 512.",
    "workload=fsdp num_sm=3": "num_sm requires workload=operator or layer.",
    "workload=fsdp +num_sm=3": "num_sm requires workload=operator or layer.",
    "+num_sm=8": "num_sm exists already; give num_sm=... without the +.",
    "method=bulkk": "Unknown method bulkk. Did you mean bulk?",
    "-m method=bulk,bulkk": "Unknown method bulkk. Did you mean bulk?",
    "workload=fdsp": "Unknown workload fdsp. Did you mean fsdp?",
    "+experiment=tuner": "Unknown experiment tuner. Did you mean tp_overlap_tuner?",
    "experiment=tp_training": "Unknown option experiment. Did you mean +experiment?",
    "+experiments=tp_training": "Unknown option experiments. Did you mean +experiment?",
    "hydra/launcher=slrum": "Unknown hydra/launcher slrum. Did you mean slurm?",
    "launcher=slurm": "Unknown option launcher. Did you mean hydra/launcher?",
    "operator=fc3": "operator=fc3 is not known; choose one of fc1, fc2, proj, qkv.",
    "model=hf": "model.name has no value; give model.name=... .",
    "-m model=hf num_sm=1,2 hydra/sweeper=bisect": "model.name has no value; give model.name=... .",
    # Values.
    "num_sm=0": "num_sm=0 is out of range; give a value from 1 to 512.",
    "tp_size=two": "tp_size=two is not a whole number; give a value from 1 to 8.",
    "-m tp_size=2,two": "tp_size=two is not a whole number; give a value from 1 to 8.",
    "runtime.isolate=maybe": "runtime.isolate=maybe is neither true nor false; give true or false.",
    "workload=kernel m=0": "m=0 is out of range; give a value from 1 to 16777216.",
    "precision=float64": "precision=float64 is not known; choose one of fp32, fp16, bf16, fp8_delayed, fp8_current, "
    "fp8_block, mxfp8, nvfp4.",
    # Several values without -m.
    "num_sm=1,2,4": several("num_sm=1,2,4", "num_sm=1,2,4"),
    "tp_size=4 num_sm=1,2": several("num_sm=1,2", "tp_size=4 num_sm=1,2"),
    "method=bulk,none": several("method=bulk,none", "method=bulk,none"),
    "num_sm=range(1,3)": several("num_sm=range(1,3)", "'num_sm=range(1,3)'"),
    "workload=job job.command=x +job.values.b=25,4": several(
        "+job.values.b=25,4", "workload=job 'job.command=\"x\"' +job.values.b=25,4"
    ),
    "workload=layer layer.variants=none,bulk": several(
        "layer.variants=none,bulk",
        "workload=layer layer.variants=none,bulk",
        ", or give one list: layer.variants=[none,bulk]",
    ),
    "hydra.job.name=a,b": HYDRAS,
    "-m hydra.job.name=a,b": HYDRAS,
    # No options at all.
    "num_sm": "num_sm has no value; give num_sm=... .",
    "sweep -m tp_size=2": f"sweep is not of the form option=value. {HELP}",
    "num_sm==8": "num_sm==8 cannot be parsed; quote values with commas, brackets or spaces, as in 'num_sm=\"a,b\"'.",
    "workload=job job.command=x +job.env.N={ranks}": (
        "+job.env.N={ranks} cannot be parsed; quote it: '+job.env.N=\"{ranks}\"'."
    ),
    "--multirn num_sm=8": "Unknown flag --multirn. Did you mean --multirun?",
    "--debug num_sm=8": "Unknown flag --debug. Did you mean runtime.debug=true?",
    "-x": f"Unknown flag -x. {HELP}",
}


@pytest.mark.parametrize("typed", MISTAKES)
def test_a_mistake_is_one_line_with_what_to_type_instead(tmp_path: Path, typed: str) -> None:
    done = launch_here(*typed.split(), "runtime.device=cpu", f"hydra.run.dir={tmp_path}", f"hydra.sweep.dir={tmp_path}")
    assert done.stderr.replace(str(tmp_path), "DIR") == f"error: {MISTAKES[typed]}\n"
    assert done.returncode == (1 if "nothing to search" in MISTAKES[typed] else 2)
    assert not list(tmp_path.rglob("result.json"))


def test_a_hugging_face_model_without_its_name_is_one_line_of_the_tuner() -> None:
    done = launch_here("-m", "+experiment=tp_overlap_tuner", "model=hf", "runtime.device=cpu")
    assert done.stderr == "error: model.name has no value; give model.name=... .\n"


def test_flags_may_follow_options() -> None:
    assert launch_here("tp_size=8", "--cfg", "job", "num_sm=37").stdout.count("num_sm: 37") == 1


@pytest.mark.parametrize(
    ("workload", "typed", "same"),
    [
        ("operator", "precision=bfloat16", "precision=bf16"),
        ("kernel", "dtype=bf16", "dtype=bfloat16"),
        ("kernel", "dtype=fp8", "dtype=float8_e4m3fn"),
        ("copy_engine", "copy_engine.dtype=fp16", "copy_engine.dtype=float16"),
        ("fsdp", "fsdp.reduce_dtype=bfloat16", "fsdp.reduce_dtype=bf16"),
        ("fsdp", "training.mixed_precision=float32", "training.mixed_precision=none"),
        ("tp_training", "tp_training.dtype=fp32", "tp_training.dtype=float32"),
    ],
)
def test_a_type_has_two_names_and_is_one_point(workload: str, typed: str, same: str) -> None:
    points, names = [], []
    register()
    for each in (typed, same):
        given = [f"workload={workload}", each, "runtime.device=cpu"]
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            config = compose("config", given)
        points.append(point.resolve(config))
        names.append(point_name(config, given))
    assert points[0] == points[1]
    assert names[0] == names[1]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("num_smm", "num_sm"),
        ("warmpu", "workload.warmup"),
        ("launcher", "hydra/launcher"),
        ("fc3", None),
        ("", None),
    ],
)
def test_nearest(name: str, near: str | None) -> None:
    assert nearest(name, ["num_sm", "workload.warmup", "hydra/launcher", "fc1"]) == near
