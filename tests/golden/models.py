"""models.txt: models, by preset, architecture or sizes, and what is said of their operators.

A new one is its line with `$ `; `make golden` writes the answers.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import yaml

from overlap_sweep.config import OF_EXPERTS, Model, ResolvedModel
from overlap_sweep.errors import UserError
from overlap_sweep.overlap import model_forms, models
from overlap_sweep.overlap.space import OPERATORS
from tests.golden import command_lines
from tests.sweeps import ROOT

FILE = Path(__file__).with_suffix(".txt")


def answer(line: str) -> str:
    """Returns what is said of a model of these sizes, if need be in place of those of a preset or of a Hugging Face
    config, at 8192 tokens and TP 1 or what the line has."""
    given: dict[str, Any] = yaml.safe_load(line)
    tokens, tp_size = given.pop("tokens", 8192), given.pop("tp_size", 1)
    known = {"name": "it"}
    if preset := given.pop("preset", None):
        known = yaml.safe_load((ROOT / f"conf/model/{preset}.yaml").read_text())
    with TemporaryDirectory() as folder:
        if config := given.pop("config", None):
            Path(folder, "config.json").write_text(json.dumps(config))
            known = {"name": folder, "source": "hf"}
        asked = Model(**{**known, **given})
        try:
            model = model_forms.resolve(asked)
            assert msgspec.convert(asdict(model), ResolvedModel) == model
            if config:
                name = f"{folder}/config.json"
                assert model_forms.resolve(replace(asked, name=name)) == replace(model, name=name)
            said = _said(model, tokens, tp_size)
        except UserError as error:
            said = [f"error: {error}"]
    return "".join(f"{line}\n" for line in said).replace(folder, "<folder>")


def _said(model: ResolvedModel, tokens: int, tp_size: int) -> list[str]:
    layers, kind = models.layers_with(model), models.kind_to_prove(model)
    said = [f"{model.normalization}, bias {model.bias}, {model.num_layers} layers {layers}, proven on {kind}"]
    reasons = {operator: models.not_overlapped(model, operator) for operator in OPERATORS}
    for operator, reason in reasons.items():
        lacks, refused = models.lacks(model, [operator]), models.refusal(model, operator, tokens, tp_size)
        try:
            shape = models.linear_shape(model, operator, tokens, tp_size)
            said.append(f"{operator}: {shape.in_features} -> {shape.out_features}")
        except UserError as error:
            said.append(f"error: {error}")
        said += [f"  refused{', lacking it' if lacks else ''}: {refused}"] if refused else []
        said += [f"  not overlapped: {reason}"] if reason else []
    said += models.applies_to(model, [operator for operator, reason in reasons.items() if not reason])
    said += [f"mixed: {mixed}" for mixed in [models.mixed(model)] if mixed]
    said += [f"latent: {name} {sizes}" for name, sizes in models.latent_projections(model).items()]
    experts = {name: size for name in OF_EXPERTS if (size := getattr(model, name))}
    assert {getattr(models.without_experts(model), name) for name in OF_EXPERTS} == {None}
    return [*said, f"experts: {experts}"] if experts else said


def write() -> None:
    """Writes the present answers into the file."""
    command_lines.write(FILE, answer)
