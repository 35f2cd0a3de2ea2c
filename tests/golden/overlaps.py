"""overlaps.txt: what is read of a tp_comm_overlap_cfg of some text, what is planned of the times of overlaps, and what
variants of a layer stand for.

A new one is its line with `$ `; `make golden` writes the answers.
"""

import tempfile
from pathlib import Path

import yaml

from overlap_sweep.errors import UserError
from overlap_sweep.overlap import overlap_cfg
from overlap_sweep.overlap.overlap_cfg import SWITCH_DEFAULTS, OverlapConfig, methods_allowed
from overlap_sweep.overlap.space import OPERATORS
from overlap_sweep.results.estimate import Estimate
from overlap_sweep.workloads import layer
from overlap_sweep.workloads.operator.choice import Candidate, PassChoice
from overlap_sweep.workloads.operator.switches import LAYERS_ALIKE, plan, unmeasured_slots
from tests.golden import command_lines
from tests.make_point import layer_point

FILE = Path(__file__).with_suffix(".txt")
SLOTTED = methods_allowed(SWITCH_DEFAULTS)


def answer(line: str) -> str:
    """Returns what is said of the line's file, plan or layer."""
    kind, _, text = line.partition(" ")
    return {"file": read, "plan": planned, "layer": varied}[kind](text)


def read(text: str) -> str:
    """Returns what Megatron-LM is given by a file of this text, where \\n is a new line, and what would refuse it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "cfg.yaml")
        path.write_text(text.replace(r"\n", "\n"))
        try:
            config = overlap_cfg.read(path)
        except UserError as error:
            (said,) = str(error).splitlines()
            assert said.startswith(str(path))
            # What it says of YAML is for the versions of the parser to change.
            said = said.removeprefix(str(path))
            return f"error: {'cannot be read' if said.startswith(' cannot be read') else said.lstrip(': ')}\n"
        path.write_text(overlap_cfg.text(config))
        assert overlap_cfg.read(path) == config, "what is written is read otherwise"
    refused = overlap_cfg.slots_refusal(config.slots) or overlap_cfg.switches_refusal(config)
    assert overlap_cfg.switches_refusal(config, ["proj", "fc2"]) is None
    on = [operator for operator in OPERATORS if overlap_cfg.overlaps(config, [operator])]
    assert overlap_cfg.overlaps(config, OPERATORS) == bool(on)
    return f"{_words(config)}; overlaps {' '.join(on) or 'nothing'}\n" + (f"refused: {refused}\n" if refused else "")


def _words(config: OverlapConfig) -> str:
    changed = {name: on for name, on in config.switches.items() if on != SWITCH_DEFAULTS[name]}
    assert config.switches.keys() == SWITCH_DEFAULTS.keys()
    slots, switches = (
        yaml.safe_dump(each, default_flow_style=True, width=9999, sort_keys=False).strip()
        for each in (config.slots, changed)
    )
    return f"{slots} switches {switches}"


def planned(text: str) -> str:
    """Returns what is planned of the times of candidates by operator and pass, with `layers` those of the model."""
    given = yaml.safe_load(text)
    layers = given.pop("layers", LAYERS_ALIKE)
    choices = [_choice(*name.split(), times) for name, times in given.items()]
    said = []
    for unmeasured in ("off", "default"):
        found = plan(choices, unmeasured, layers)
        tried = {slot for choice in found.choices for slot in choice.tried_slots}
        others = unmeasured_slots(found.config, tried, layers)
        assert {one.slot for one in others} | tried == {slot for slot in SLOTTED if slot.partition("_")[0] in layers}
        assert found.config.switches == {**SWITCH_DEFAULTS, **{one.name: one.value for one in found.switches}}
        by_how = {how: [one.slot for one in others if one.runs == how] for how in ("off", "default", "as set")}
        said += [
            f"unmeasured={unmeasured}: {', '.join(final.name for final in found.finals)}; {_words(found.config)}",
            *(f"  {one.name}={str(one.value).lower()}: {one.reason}" for one in found.switches),
            *(f"  {overruled}" for overruled in found.overruled),
            *(f"  not measured, {how}: {', '.join(slots)}" for how, slots in by_how.items() if slots),
        ]
    return "".join(f"{line}\n" for line in said)


def varied(text: str) -> str:
    """Returns the variants that a layer point of these changes runs, and what each of them configures."""
    point = layer_point(**yaml.safe_load(text))
    try:
        names, configurations = layer.names(point), layer.configurations(point)
    except UserError as error:
        return f"error: {error}\n"
    said = [", ".join(names)]
    for name, config in configurations.items():
        assert overlap_cfg.slots_refusal(config.slots) is overlap_cfg.switches_refusal(config) is None
        allowed = methods_allowed(config.switches)
        off = [slot for slot, setting in config.slots.items() if setting["method"] not in allowed[slot]]
        others = [slot for slot, methods in allowed.items() if methods and slot not in config.slots]
        said.append(
            f"  {name}: {_words(config)}; by default {' '.join(others) or 'nothing'}"
            + (f"; switched off {' '.join(off)}" if off else "")
        )
    return "".join(f"{line}\n" for line in said)


def _choice(operator: str, pass_name: str, candidates: dict[str, float]) -> PassChoice:
    """Candidates by a word for their setting: `none`, `ring`, or for a backward pass `bulk+bulk`, `-+bulk`, `ring`."""
    phases = ("fprop",) if pass_name == "fwd" else ("dgrad", "wgrad")
    made = []
    for word, time_us in candidates.items():
        methods = zip(phases, word.replace("ring", "ring_exchange").split("+"), strict=False)
        settings = {f"{operator}_{phase}": {"method": how} for phase, how in methods if how not in ("none", "-")}
        made.append(Candidate(settings, Estimate(time_us, 0.0, 5), (), None))
    best = min(made, key=lambda candidate: candidate.time_us)
    return PassChoice(2, operator, pass_name, tuple(made), best, "fastest", 0.0, None, None)


def write() -> None:
    """Writes the present answers into the file."""
    command_lines.write(FILE, answer)
