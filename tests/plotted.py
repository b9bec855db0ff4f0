"""What a picture shows, from the JSON beside it."""

import json
from pathlib import Path


def read_plotted(path):
    """One dictionary for each point of the picture at `path`; None where no number was."""
    points = []
    for series in json.loads(Path(path).with_name(f"{Path(path).stem}_plotted.json").read_text(encoding="utf-8")):
        texts = {name: value for name, value in series.items() if isinstance(value, str)}
        numbers = {name: values for name, values in series.items() if name not in texts}
        points += [texts | dict(zip(numbers, values)) for values in zip(*numbers.values())]
    return points
