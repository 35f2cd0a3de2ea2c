"""Charts in four forms that know no workload: bars, lines, dots, gantt.

Whoever wants a chart builds a `Bars`, `Lines`, `Dots` or `Gantt` and gives it to `figures.figure`: how it is drawn,
what a screen reader says of it, colours, cache and PNGs come with the form.
"""
