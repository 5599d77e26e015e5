"""Writes `eval/tasks.json`: questions that the model was taught to answer, with the whole right answer of each.

    python tasks.py ../eval/tasks.json

Wordings and tables are those of `synth_chat.py`, answers are computed here. Sums, differences and JSON objects are drawn
with a fixed seed; products, capitals and days are all there are. The group names and sizes are those of
`simple_tasks.json`, whose own questions were not recorded: `recorded` repeats its counts.
"""

import json
import random
import sys
from pathlib import Path

from synth_chat import CAPITALS, DAYS, NAMES, country


def sums(r, low, high):
    pairs = r.sample([(a, b) for a in range(low, high + 1) for b in range(low, high + 1)], 150)
    return [(f"What is {a}+{b}?", f"{a}+{b}={a + b}.") for a, b in pairs]


def differences(r):
    pairs = r.sample([(a, b) for a in range(21) for b in range(a + 1)], 150)
    return [(f"What is {a}-{b}?", f"{a}-{b}={a - b}.") for a, b in pairs]


def products():
    return [(f"What is {a} times {b}?", f"{a}*{b}={a * b}.") for a in range(13) for b in range(13)]


def capitals():
    places = [(country(name), city) for name, city, _ in CAPITALS]
    return [(f"What is the capital of {place}?", f"The capital of {place} is {city}.") for place, city in places]


def days():
    pairs = [(word, i, (i + step) % 7) for word, step in (("after", 1), ("before", -1)) for i in range(7)]
    return [(f"What day comes {w} {DAYS[i]}?", f"The day {w} {DAYS[i]} is {DAYS[j]}.") for w, i, j in pairs]


def people(r):
    pairs = r.sample([(name, age) for name in NAMES for age in range(3, 81)], 100)
    return [
        (f"Give me a JSON object with name {name} and age {age}.", json.dumps({"name": name, "age": age}))
        for name, age in pairs
    ]


def main():
    r = random.Random(5)
    groups = {
        "sums, both up to 20": sums(r, 0, 20),
        "sums, both 21 to 99": sums(r, 21, 99),
        "differences up to 20": differences(r),
        "products up to 12": products(),
        "capitals": capitals(),
        "day after / before": days(),
        "JSON name and age": people(r),
    }
    recorded = json.loads((Path(__file__).parent.parent / "eval/simple_tasks.json").read_text())["right_of"]
    out = []
    for name, tasks in groups.items():
        assert len(tasks) == recorded[name][1], (name, len(tasks))
        out.append({"name": name, "recorded": recorded[name], "tasks": tasks})
    lines = json.dumps({"groups": out}, indent=1)
    # One question a line.
    lines = lines.replace("[\n     ", "[").replace(",\n     ", ", ").replace("\n    ]", "]")
    assert json.loads(lines) == json.loads(json.dumps({"groups": out}))
    Path(sys.argv[1]).write_text(lines + "\n")


main()
