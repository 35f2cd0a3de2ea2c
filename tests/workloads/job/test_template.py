"""Command lines are split as a shell splits them, with placeholders for its variables."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from overlap_sweep.errors import UserError
from overlap_sweep.workloads.job.template import Filling, filled, split

VALUES = {"a": "1", "several": "--x 2  --y", "none": "", "hostile": """it's {"a": "$HOME"}; \\ | rm"""}
FILLINGS = {name: Filling(value, tuple(value.split())) for name, value in VALUES.items()}
FILLINGS["whole"] = Filling("a b", ("a b",))

TEMPLATES = [
    "python t.py --x={a} --y {a}{a}",
    "python   t.py\t--x  --y",
    "python t.py {several} --z{several}z",
    'python t.py "{several}" {none} "{none}" x{none}y --e={none}',
    "python t.py '{a} \"b\" \\ c' \"{a} 'b' \\\" \\\\ \\c\" d\\ e\\'f",
    'python "t"\'.p\'y ""',
    "python t.py \\\n --x \\\n{a} a\\\nb",
    'python t.py "{hostile}" "x{hostile}"',
    "python t.py 'a;b' 'a && b' '$HOME' '`x`' '~/x' '>' \"\\$HOME\" \\$HOME a\\;",
    "python t.py http://x?a=1#b @x %y ^z",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_words_are_those_of_a_shell_whose_variables_are_the_placeholders(template: str) -> None:
    """A placeholder in single quotes is filled in, too: there a shell would not."""
    as_shell = template.replace("'{a} \"b\" \\ c'", '"$a \\"b\\" \\\\ c"')
    for name in VALUES:
        as_shell = as_shell.replace(f"{{{name}}}", f"${{{name}}}")
    script = f"set -f; words() {{ {sys.executable} -c 'import json, sys; print(json.dumps(sys.argv[1:]))' \"$@\"; }}; "
    shell = subprocess.run(["bash", "-c", f"{script} words {as_shell}"], env=VALUES, capture_output=True, check=True)
    assert split(template, FILLINGS, "job.command") == json.loads(shell.stdout)


def test_what_is_one_word_stays_one_and_braces_are_written_twice() -> None:
    assert split("python {whole}/x {{a}} '{{\"k\": {a}}}'", FILLINGS, "job.command") == [
        *("python", "a b/x", "{a}", '{"k": 1}'),
    ]
    assert filled("{a}/{{{whole}}}", FILLINGS, "job.directory") == "1/{a b}"


REFUSED = {
    "python t.py {bb}": "job.command has the placeholder {bb} without a value; give +job.values.bb=... .",
    "python t.py {severa}": "job.command has the placeholder {severa} without a value; did you mean {several}?",
    "a {x:megatron}": "job.command has the placeholder {x:megatron} without a value; give +job.values.x=... .",
    "python t.py {a:>3}": "job.command has {a:>3}, but the only form of a placeholder is {a:megatron}.",
    "python t.py {}": "job.command has {}, which is not a placeholder; write {{ and }} for braces.",
    "python t.py {a!r}": "job.command has {a!r}, which is not a placeholder; write {{ and }} for braces.",
    "python t.py {0}": "job.command has {0}, which is not a placeholder; write {{ and }} for braces.",
    "python t.py '{\"k\": {a}}'": "job.command has unbalanced braces; write {{ and }} for braces.",
    "python t.py a}": "job.command has unbalanced braces; write {{ and }} for braces.",
    "python t.py 'a": "job.command has an open quote; close it.",
    "python t.py \\": "job.command ends in a backslash; write \\\\ for one.",
    " ": "job.command is empty; give a command line, such as 'torchrun train.py'.",
    "{none}": "job.command is empty; give a command line, such as 'torchrun train.py'.",
    "A=1 python t.py": "job.command begins with A=1, but is run without a shell; give +job.env.A=... .",
    "A={a} python t.py": "job.command begins with A=1, but is run without a shell; give +job.env.A=... .",
}
REFUSED["python ${HOME}/t.py"] = (
    "job.command has ${HOME}, but is run without a shell; give bash -c '...', and in there ${{HOME}}."
)
NEEDS_A_SHELL = {
    "cd x && python t.py": "&&",
    "python t.py | tee log": "|",
    "python t.py; true": "t.py;",
    "python t.py &": "&",
    "python t.py > log": ">",
    "python t.py 2>&1": "2>&1",
    "python t.py &>log": "&>log",
    "python ~/t.py": "~/t.py",
    "python $HOME/t.py": "$HOME/t.py",
    "python '$x' \"$HOME/t.py\"": '$HOME/t.py"',
    "python $(which t.py)": "$(which",
    "python `which t.py`": "`which",
}
REFUSED |= {
    template: f"job.command has {word}, but is run without a shell; give bash -c '...', or put it in single quotes."
    for template, word in NEEDS_A_SHELL.items()
}


@pytest.mark.parametrize("template", REFUSED)
def test_what_cannot_be_run_is_one_line(template: str) -> None:
    with pytest.raises(UserError) as refused:
        split(template, FILLINGS, "job.command")
    assert str(refused.value) == REFUSED[template]
