"""Prints as Markdown what was planted into programs and what `diagnose` finds in their recordings, and what following
its advice gained.

    python benchmarks/record_causes.py RECORDINGS --device cuda --nproc 2
    python benchmarks/causes_table.py RECORDINGS
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from causes.gains import gains_of

from overlap_sweep.diagnosis import Diagnosis, Finding
from overlap_sweep.diagnosis.runs import diagnose

LISTED = 3


def main() -> None:
    recordings = Path(sys.argv[1])
    described = {
        (one := json.loads(path.read_text()))["name"]: one for path in sorted(recordings.glob("*/scenario.json"))
    }
    diagnoses = {
        Path(diagnosis.run).parent.name: diagnosis for diagnosis in diagnose(sorted(recordings.glob("*/trace_rank*")))
    }
    by_cause = sorted(described.values(), key=lambda one: (one["cause"], one["name"]))
    print(*causes_table(by_cause, diagnoses), sep="\n")
    print()
    print(*advice_table(by_cause, described, diagnoses), sep="\n")


def causes_table(described: list[dict[str, Any]], diagnoses: Mapping[str, Diagnosis]) -> list[str]:
    lines = ["| program | step ms | planted | found: share of the step |", "|---|---|---|---|"]
    first = 0
    for one in described:
        findings = diagnoses[one["name"]].findings
        first += findings[0].cause == one["cause"]
        who = "" if one["late_rank"] is None else f", rank {one['late_rank']}"
        found = "; ".join(_short(finding) for finding in findings[:LISTED])
        more = f"; {len(findings) - LISTED} more" if len(findings) > LISTED else ""
        lines.append(f"| {one['name']} | {one['step_ms']:.1f} | {one['cause']}{who} | {found}{more} |")
    return [*lines, "", f"The planted cause is the first finding in {first} of {len(described)}."]


def _short(finding: Finding) -> str:
    about = [finding.collective, finding.pass_] if finding.collective else []
    about += [f"rank {finding.rank}"] if finding.cause == "straggler" else []
    return " ".join(filter(None, [f"{finding.cause} {finding.share:.1%}", *about]))


def advice_table(
    described: list[dict[str, Any]], others: Mapping[str, dict[str, Any]], diagnoses: Mapping[str, Diagnosis]
) -> list[str]:
    lines = [
        "| program | cause | lost at most, ms | what was changed | before, ms | after, ms | gained, ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in described:
        own = [finding for finding in diagnoses[one["name"]].findings if finding.cause == one["cause"]]
        lost_ms = sum(finding.lost_us for finding in own) / 1000
        for gain in gains_of(one, others):
            # Tokens that share the reading of weights cost less: no cause's time bounds that.
            bound = f"{lost_ms:.2f}" if gain.work == 1 else ""
            before, after = median(gain.before_ms), median(gain.after_ms)
            lines.append(
                f"| {one['name']} | {one['cause']} | {bound} | {gain.advice} | {before:.2f} | {after:.2f} "
                f"| {gain.gained_ms:.2f} ± {gain.uncertain_ms:.2f} |"
            )
    return lines


if __name__ == "__main__":
    main()
