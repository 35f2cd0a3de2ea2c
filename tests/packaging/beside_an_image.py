"""Resolves what installing the wheel means in an image that has its own PyTorch, Transformer Engine and Megatron-Core,
which pip must leave as they are: `python tests/packaging/beside_an_image.py WHEEL`, run by .ci/wheel.

The image's libraries are stand-ins of metadata alone, in versions that a requirement with a lower bound would replace.
"""

import json
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

IMAGE = {
    "torch": "2.10.0a0+b558c986e8.nv25.11",
    "transformer_engine": "2.9.0+70f53666",
    "megatron_core": "0.15.0rc8",
    "numpy": "2.1.0",
}
EXTRAS = ("", "[torch,gpu,autotp,optuna,mlflow,wandb]")


def write_stand_in(folder: Path, name: str, version: str) -> Path:
    """Writes a wheel that holds nothing but its metadata."""
    path, info = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "".join(f"{info}/{file},,\n" for file in ("METADATA", "WHEEL", "RECORD")))
    return path


def main(wheel: str) -> None:
    """Exits with a message if any way to install the wheel would touch what the image has."""
    with tempfile.TemporaryDirectory() as scratch:
        image = Path(scratch)
        venv.create(image / "venv", with_pip=True)
        pip = [str(image / "venv/bin/python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
        stand_ins = [str(write_stand_in(image, name, version)) for name, version in IMAGE.items()]
        subprocess.run([*pip, "install", "--no-index", "--no-deps", *stand_ins], check=True)
        for extra in EXTRAS:
            report = image / "report.json"
            subprocess.run([*pip, "install", "--dry-run", "--report", str(report), f"{wheel}{extra}"], check=True)
            chosen = {one["metadata"]["name"] for one in json.loads(report.read_text())["install"]}
            if replaced := {name.replace("-", "_") for name in chosen} & set(IMAGE):
                sys.exit(f"overlap-sweep{extra} would replace {', '.join(sorted(replaced))} of an image")
            print(f"overlap-sweep{extra} adds {len(chosen)} packages and replaces none of {', '.join(IMAGE)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
