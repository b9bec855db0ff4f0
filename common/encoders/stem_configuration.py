"""timm's config.json of a stem: every key is honoured, changes no feature, or is refused."""

import math
from pathlib import Path
from typing import Any

from common.data.text_files import read_json_object

Colours = tuple[tuple[float, ...], tuple[float, ...]]  # mean and standard deviation, of pixels in [0, 1]

HUB_FILES = ("model.safetensors", "pytorch_model.bin")  # described by a config.json in the same folder
HONOURED = {"mean", "std", "input_size", "fixed_input_size", "classifier"}
CHANGES_NOTHING = {
    # where the weights came from
    *("url", "file", "state_dict", "hf_hub_id", "hf_hub_filename", "source", "architecture", "tag", "custom_load"),
    # how timm's own evaluation cuts an image; a run has data.image_size and data.resize
    *("test_input_size", "min_input_size", "interpolation", "crop_pct", "test_crop_pct", "crop_mode"),
    # of the head and the pooling, which come after the features, and of inputs without three channels
    *("num_classes", "label_offset", "label_names", "label_descriptions", "pool_size", "test_pool_size", "first_conv"),
    *("license", "description", "origin_url", "paper_name", "paper_ids", "notes"),
}
# Beside "pretrained_cfg". timm reads none of these but model_args for what it builds.
OF_THE_FILE = {
    *("architecture", "pretrained_cfg", "model_args", "num_classes", "num_features", "global_pool"),
    *("labels", "label_names", "label_descriptions"),
}
_ARGUMENTS = {  # of model_args: act in training, in the head, or are the defaults of every network
    *("num_classes", "drop_rate", "drop_path_rate", "proj_drop_rate", "attn_drop_rate", "pos_drop_rate"),
    *("patch_drop_rate", "head_drop_rate"),
}


class StemError(ValueError):
    """A stem that cannot be loaded; the message is for the user."""


def configuration_file(weights: str) -> Path | None:
    """The config.json of weights: in their folder, or beside a file with a name of `HUB_FILES`."""
    path = Path(weights).expanduser()
    if not weights or (path.is_file() and path.name not in HUB_FILES):
        return None
    file = (path if path.is_dir() else path.parent) / "config.json"
    return file if file.is_file() else None


def read_configuration(file: Path, name: str) -> dict[str, Any]:
    """Arguments with which timm.create_model builds the network of a config.json.

    Args:
        file: as timm writes it, or in the older form without "pretrained_cfg".
        name: of the stem; its tag is ignored.
    Raises:
        StemError: a key that is unknown or would change the features; names key and value.
    """
    content = read_json_object(file)
    pretrained = content.get("pretrained_cfg")
    if pretrained is None:  # the older form
        pretrained = {key: value for key, value in content.items() if key not in OF_THE_FILE}
        content = {key: value for key, value in content.items() if key in OF_THE_FILE}
    unknown = [(key, content[key]) for key in content.keys() - OF_THE_FILE]
    unknown += [(f"pretrained_cfg.{key}", pretrained[key]) for key in pretrained.keys() - HONOURED - CHANGES_NOTHING]
    if unknown:
        key, value = min(unknown)
        raise StemError(f"{file}: {key} = {value!r} is not known; expected the keys that timm writes: remove it")
    architecture = content.get("architecture", pretrained.get("architecture"))
    if architecture != name.partition(".")[0]:
        raise StemError(f"{file}: architecture = {architecture!r}, model.image.stem.name = {name}; expected: the same")
    configuration = {key: pretrained[key] for key in HONOURED if key in pretrained}
    check_colours(configuration.get("mean", (0.0,) * 3), configuration.get("std", (1.0,) * 3), str(file))
    size = configuration.get("input_size", (3, 0, 0))
    if not isinstance(size, list | tuple) or len(size) != 3 or size[0] != 3:
        raise StemError(f"{file}: input_size = {size!r}; expected: [3, height, width]")
    arguments = {key: value for key, value in (content.get("model_args") or {}).items() if key not in _ARGUMENTS}
    if arguments.pop("in_chans", 3) != 3:
        raise StemError(f"{file}: model_args.in_chans = {content['model_args']['in_chans']!r}; expected: 3")
    return {"pretrained_cfg": {"architecture": architecture, **configuration}, **arguments}


def check_colours(mean: Any, std: Any, where: str) -> None:
    """Refuses all but three numbers for mean and std, std above 0."""
    for key, values, low in (("mean", mean, -math.inf), ("std", std, 0.0)):
        is_three = isinstance(values, list | tuple) and len(values) == 3
        if not is_three or not all(isinstance(value, int | float) and low < value < math.inf for value in values):
            above = " above 0" if key == "std" else ""
            raise StemError(f"{where}: {key} = {values!r}; expected: three numbers{above}")


def colours_beside(name: str, weights: str) -> Colours | None:
    """Mean and standard deviation of a config.json; None = no such file, or as timm's for the name."""
    file = configuration_file(weights)
    if file is None:
        return None
    import timm

    pretrained = timm.models.PretrainedCfg(**read_configuration(file, name)["pretrained_cfg"])
    colours, usual = ((tuple(source.mean), tuple(source.std)) for source in (pretrained, timm.get_pretrained_cfg(name)))
    return None if colours == usual else colours


def check_one_colour(name: str, weights: str) -> None:
    """Refuses a bare file for a name of which timm has weights with several means and deviations."""
    import timm

    if "." in name:
        return
    tag_of_colours = {}
    for tagged in timm.list_models(f"{name}.*", pretrained=True):
        pretrained = timm.get_pretrained_cfg(tagged)
        tag_of_colours.setdefault((tuple(pretrained.mean), tuple(pretrained.std)), tagged)
    if len(tag_of_colours) > 1:
        kinds = "; ".join(f"{tagged}: mean {mean}, std {std}" for (mean, std), tagged in tag_of_colours.items())
        raise StemError(
            f"{weights} does not state the mean and std of its training, and timm's {name} have several ({kinds}); "
            "expected: a config.json beside model.safetensors, model.image.stem.name with the tag of the weights, or "
            "model.image.stem.mean and .std"
        )
