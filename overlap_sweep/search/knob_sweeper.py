"""`hydra/sweeper=knobs`: searches the knobs of a workload through any Hydra launcher, with the algorithm in `knobs`.

A swept key is a knob if the sweeper's `params` or the workload's `searchable` name it. Every combination of values of
the other swept keys (`model=a,b`, `distributed.dp_size=4,8`) is a separate search.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

from overlap_sweep.report.searches import knob_lines
from overlap_sweep.results.estimate import Estimate, estimate
from overlap_sweep.results.gain import Gain
from overlap_sweep.results.records import Contribution, FailedKnobs, KnobFinal, KnobRecord, KnobSearch, TriedKnobs
from overlap_sweep.results.run_directory import Result
from overlap_sweep.runtime.outcome import outcomes
from overlap_sweep.runtime.progress import announce, shown_waiting
from overlap_sweep.search import Failure, Samples, Setting, conduct, finals
from overlap_sweep.search.knob_space import THE_BASELINE, KnobSpace, find_spaces, searchable
from overlap_sweep.search.knob_trail import Answer, KnobTrail, one_by_one
from overlap_sweep.search.knobs import search
from overlap_sweep.search.measured import Measurements, SearchInputs
from overlap_sweep.search.prior import Prior
from overlap_sweep.search.undecided import rivals, verdict

STILL_RUNNING = "still running"
"""Why a search has not ended, as its record says until it does."""


class Searching:
    """The running search of one case."""

    def __init__(
        self,
        space: KnobSpace,
        measurements: Measurements,
        share: float,
        prior: Prior | None = None,
        objection: Callable[[Result], str] = lambda result: "",
    ) -> None:
        """`share`: fraction of the remaining budget for this search. `objection`: returns why an `ok` result must not
        be used, empty if it may."""
        self.space, self._measurements, self._objection = space, measurements, objection
        self.trail = KnobTrail(space.knobs, space.refusal, self._room, prior)
        self.ended = False
        self._requests: Counter[Setting] = Counter()
        self._points: dict[Setting, list[str]] = defaultdict(list)
        self._results: list[Result] = []
        self._amount = 0.0
        """Amount of work in the baseline."""
        budget = measurements.budget
        self._most_points = math.inf if budget.points_left is None else budget.points + share * budget.points_left
        self._ends_s = budget.elapsed_s + share * (budget.ends_s - budget.began_s - budget.elapsed_s)

    @property
    def found(self) -> KnobSearch:
        """Returns the present answer."""
        budget = self._measurements.budget
        limited = [name for name in ("max_points", "max_minutes") if getattr(budget, name) is not None]
        limits = [outcomes.option(f"search.{name}") for name in limited]
        why = budget.why_spent or f"{' or '.join(limits)} is nearly used up"
        search = answer(self.trail, self._points)
        search.label, search.overrides = self.space.label, self.typed
        search.baseline_points = self._points[self.trail.baseline]
        if search.answered:
            search.best_points = self._points[self.trail.best]
        search.stopped = why if self.trail.cut else "" if self.ended else STILL_RUNNING
        if self.trail.prior and search.answered:
            search.verdict = verdict(self.trail, unfinished=bool(search.stopped and search.untried))
            seemed = [self.trail.best] if search.best else rivals(self.trail)
            search.seemed = self.trail.overrides(seemed[0]) if search.verdict == "undecided" and seemed else {}
        search.refused = dict(Counter(filter(None, self.space.refusals.values())))
        search.left_out, search.points = self.space.left_out, len(self._results)
        search.host_bound = sum(result.launch_bound for result in self._results)
        return search

    @property
    def typed(self) -> list[str]:
        """Returns the overrides of a single run of the search's baseline."""
        trail = self.trail
        other = trail.overrides(trail.baseline, trail.first_values)
        kept = [override for override in self.space.typed if override.partition("=")[0] not in other]
        return [*kept, *(f"{key}={value}" for key, value in other.items())]

    @property
    def progress(self) -> str:
        """Returns a progress line; empty until the baseline was measured."""
        trail, budget = self.trail, self._measurements.budget
        if trail.baseline not in trail.found.of:
            return ""
        stage = "proving" if trail.proof.of else "best so far"
        shown = trail.best
        if trail.prior and trail.proof.of and shown == trail.baseline:
            stage, shown = "undecided", next(iter(rivals(trail)), shown)
        gain = trail.compared(shown)
        less = f" ({gain.in_words('the baseline')})" if gain and shown != trail.baseline else ""
        return f"{budget.points} points in {budget.elapsed_s:.0f} s; {stage}: {trail.name(shown)}{less}"

    def _room(self) -> float:
        """Returns the number of points that fit into the budget of points, and of time at the present rate."""
        budget = self._measurements.budget
        points = self._most_points - budget.points
        new = budget.points - self._measurements.reused
        measuring_s = budget.elapsed_s - budget.other_s
        return min(points, (self._ends_s - budget.elapsed_s) * new / measuring_s) if new else points

    def measure(self, settings: Sequence[Setting]) -> list[Answer]:
        return [self._answer(result) if result else None for result in self.results(settings)]

    def results(self, settings: Sequence[Setting]) -> list[Result | None]:
        """Returns the result of one more measurement of each setting; None if the budget ended before."""
        jobs = []
        for setting in settings:
            jobs.append(self.space.job(setting, self._requests[setting]))
            self._requests[setting] += 1
        results = self._measurements.measure(jobs)
        for setting, result in zip(settings, results, strict=True):
            if result:
                self._results.append(result)
                self._points[setting] += [result.name] if result.status == "ok" else []
        return results

    @property
    def why_spent(self) -> str:
        return self._measurements.budget.why_spent

    def _answer(self, result: Result) -> Answer:
        if result.status != "ok":
            return Failure(result.reason, refused=result.status == "skipped")
        known = searchable(result.point.workload.name)
        first = next(one for one in self._results if one.status == "ok")
        if said := known.deviation(result, first):
            return Failure(said, wrong_numbers=True)
        if reason := self._objection(result):
            return Failure(reason)
        sample = known.sample(result)
        self._amount = self._amount or sample.amount
        return sample.scaled(self._amount / sample.amount)


def record_of(
    measurements: Measurements, searches: Sequence[Searching], finals: Sequence[KnobFinal] = ()
) -> KnobRecord:
    """Returns what knobs.json has of searches, at this time."""
    budget = measurements.budget
    return KnobRecord(
        points=budget.points,
        reused=measurements.reused,
        elapsed_s=budget.elapsed_s,
        searches=[searching.found for searching in searches],
        finals=[*finals],
    )


def answer(trail: KnobTrail, points: Mapping[Setting, list[str]]) -> KnobSearch:
    """Returns the answer of a running or ended search. `points`: names of those that measured each setting."""
    pairs = zip(trail.knobs, trail.baseline, strict=True)
    knobs: dict[str, list[str]] = {}
    for knob, value in pairs:
        knobs.setdefault(knob.key, [value]).extend(one for one in knob.values if one != value)
    search = KnobSearch(label="", overrides=[], knobs=knobs, notes=[*trail.drops, *trail.notes], grid=trail.grid)
    base = trail.baseline
    search.failed = [
        FailedKnobs(
            changed=trail.overrides(setting),
            reason=reason,
            change=_change(trail, setting),
            points=points.get(setting, []),
        )
        for setting, reason in trail.failed.items()
    ]
    if trail.prior:
        search.expected = {trail.name_of(change): one for change, one in trail.prior.expected.items()}
        search.expected_scale = trail.prior.scale
        measured = {change for setting in trail.found.of for change in trail.changed(setting).items()}
        search.hopeless = {trail.name_of(one): most for one, most in trail.left_out.items() if one not in measured}
    if base not in trail.found.of:
        search.dropped = trail.failed.get(base, "")
        return search
    best = trail.best
    search.proven = best == base or trail.chosen is not None
    samples = trail.proof if search.proven and best != base else trail.found
    search.best = trail.overrides(best)
    search.baseline_us, search.gain = samples.time_us(base), trail.compared(best)
    assert search.gain
    search.time_us = search.baseline_us * search.gain.ratio
    search.over_none = _over_none(samples, best)
    search.disturbed = samples.disturbed
    search.by_time = not samples.paired and (best != base or samples.disturbed is not None)
    tried = list(trail.effects)
    order = sorted(trail.changed(best).items(), key=lambda one: tried.index(one) if one in tried else len(tried))
    search.contributions = [_contribution(trail, best, index) for index, _ in order]
    search.settings = len(trail.found.of) + len(trail.failed)
    for setting in sorted(trail.found.of, key=trail.found.time_us):
        found, change = trail.found.estimate(setting), _change(trail, setting)
        search.tried.append(
            TriedKnobs(
                changed=trail.overrides(setting),
                time_us=found.time_us,
                noise_us=found.noise_us,
                measurements=len(trail.found.of[setting]),
                gain=None if setting == base else trail.compared(setting),
                change=change,
                added=trail.found.share(trail.tried_on[setting], setting) if change else None,
                points=points.get(setting, []),
            )
        )
    return search


def _change(trail: KnobTrail, setting: Setting) -> str:
    """Returns the single change that was tried with the setting, where they are tried one on top of the other."""
    changes = [*trail.changed(setting, trail.tried_on.get(setting, setting)).items()]
    return trail.name_of(changes[0]) if len(changes) == 1 else ""


def _contribution(trail: KnobTrail, best: Setting, index: int) -> Contribution:
    with_it, without = one_by_one(trail, trail.baseline, best)[index], one_by_one(trail, best, trail.baseline)[index]
    return Contribution(
        key=trail.knobs[index].key,
        baseline=trail.baseline[index],
        value=best[index],
        alone=trail.compared(with_it) if with_it else None,
        taken_away=trail.compared(best, without) if without else None,
        added=trail.effects.get((index, best[index])) if trail.tried_on else None,
    )


def _over_none(samples: Samples, setting: Setting) -> Gain | None:
    """Returns the setting's gain over no overlap, from the paired times of all its samples."""
    pairs = [pair for sample in samples.of[setting] for pair in zip(sample.times_us, sample.none_us, strict=False)]
    if not pairs:
        return None
    ratio: Estimate = estimate([time_us / none_us for time_us, none_us in pairs])
    return Gain(1 - ratio.time_us, ratio.noise_us)


def sweep(inputs: SearchInputs) -> None:
    """Searches every case, prints the answers, and writes `knobs.json` after every batch. UserError, before anything
    runs, if there is nothing to search or a value is wrong."""
    with shown_waiting("composing what is searched"):
        spaces = find_spaces(inputs)
    measurements = Measurements.begin(inputs)
    announce([space.point() for space in spaces], outcomes)
    searches, held = list[Searching](), list[KnobFinal]()

    def measure(settings: Sequence[Setting]) -> list[Answer]:
        record_of(measurements, searches, held).write(measurements.directory)
        if line := searches[-1].progress:
            print(f"knobs: {line}", flush=True)
        return searches[-1].measure(settings)

    contests = finals.contests(spaces)
    competing = [space for contest in contests for space in contest]
    for index, space in enumerate(spaces):
        if not space.knobs:
            reasons = "; ".join(f"{key}: {why}" for key, why in space.left_out.items())
            print(f"knobs: {space.label} not searched: {reasons}", flush=True)
            if space not in competing or THE_BASELINE in space.left_out:
                continue
        else:
            knobs = ", ".join(f"{knob.key}={','.join(knob.values)}" for knob in space.knobs)
            print(f"knobs: {space.label}: {knobs}", flush=True)
        # The final gets as much of the budget as a search.
        searches.append(Searching(space, measurements, 1 / (len(spaces) - index + bool(contests))))
        conduct(search(searches[-1].trail, inputs.config.search), measure)
        searches[-1].ended = True
    for contest in contests:
        print("knobs: the best settings side by side", flush=True)
        refused = {space.label: why for space in contest if (why := space.left_out.get(THE_BASELINE))}
        final = finals.hold([one for one in searches if one.space in contest], max(2, inputs.config.search.repeats))
        final.left_out = {**refused, **final.left_out}
        held.append(final)
    path = record_of(measurements, searches, held).write(measurements.directory)
    outcomes.answered = any(searching.found.time_us is not None for searching in searches)
    print("\n".join(knob_lines(record_of(measurements, searches, held))))
    print(f"knobs: all measurements are in {path}", flush=True)
