"""How the configuration of a sentence encoder turns tokens into one vector."""

from pathlib import Path
from typing import Any

from common.data.text_files import read_json, read_json_object, stated_file

_POOLING = "pooling_mode_"
_MODULES = ("Transformer", "Pooling", "Normalize")  # of sentence-transformers; a geometry normalises by itself


def check_pooling(name: str) -> None:
    """Refuses a sentence encoder (folder or hub name) that does not average its tokens.

    One without modules.json passes.
    """
    modules = stated_file(name, "modules.json")
    if modules is None:
        return
    instead = "; a text tower with model.text.layers above 0 reads the tokens and takes any of them"
    for module in read_json(modules):
        kind = module["type"].rpartition(".")[2]
        if kind not in _MODULES:
            raise ValueError(f"{modules}: type = {module['type']}; expected: {', '.join(_MODULES)}{instead}")
        if kind == "Pooling":
            file_name = f"{module['path']}/config.json"
            file = stated_file(name, file_name)
            if file is None:
                raise ValueError(f"{modules}: path = {module['path']!r}, and {name} has no {file_name}; expected: both")
            _check_mean(file, read_json_object(file), instead)


def _check_mean(file: Path, content: dict[str, Any], instead: str) -> None:
    modes = {key: value for key, value in content.items() if key.startswith(_POOLING) and value}
    modes |= {"pooling_mode": content["pooling_mode"]} if "pooling_mode" in content else {}
    for key, value in modes.items():
        if (key, value) not in ((f"{_POOLING}mean_tokens", True), ("pooling_mode", "mean")):
            raise ValueError(f"{file}: {key} = {value!r}; expected: {_POOLING}mean_tokens only{instead}")
