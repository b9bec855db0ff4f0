"""From a checkpoint to its model, its evaluations and their files."""

import argparse
import json
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from common.base.arguments import Parser, expanded, file_to_write
from common.base.config import ConfigError, from_dict, override
from common.base.dependencies import loaded_files
from common.base.files import shown, write_json
from common.base.places import outputs
from common.base.provenance import hash_of
from common.data.pairs import EvaluationSets, Pairs, open_evaluation_sets
from common.data.text import tokenizer_from_json
from common.data.tokenizer import Tokenizer
from common.data.transforms import ImageTransform
from common.distributed import is_main_process
from common.encoders.two_towers import TwoTowers
from common.encoders.weights import HEADS_HELP, NOT_STATED, heads_argument, settings_of
from common.evaluation.embed import Encoder, evaluate_retrieval, evaluate_zero_shot
from common.evaluation.protocol import PUBLISHED, Evaluation, as_json, evaluation_text
from common.run.checkpoint import Checkpoint, CheckpointError, last_checkpoint, named_checkpoint
from common.run.evaluation_files import save_evaluations
from common.run.folder import RunFiles, provenance_of
from common.run.inputs import feature_cache, keep_captions
from common.run.launch import ending_together, join_processes
from common.run.sources import run_checkpoint

DECIDES = "evaluation"

# ---------------------------------------------------------------- from a checkpoint to its model


_WRITTEN_BY = {  # kind of a checkpoint -> what wrote it, and what evaluates it
    "": ("train.py", "evaluate.py --checkpoint {path}"),
    "task": ("finetune.py", "evaluate_tasks.py --checkpoint {path}"),
    "vision": ("pretrain.py", "evaluate_pictures.py --checkpoint {path}"),
}


def check_writer(checkpoint: Checkpoint, paper: str, kind: str, script: str) -> None:
    """Refuses a checkpoint that another script evaluates: CheckpointError with its command."""
    writer, written = checkpoint.state["paper"], checkpoint.state.get("kind", "")
    if (writer, written) != (paper, kind):
        by, then = _WRITTEN_BY[written]
        raise CheckpointError(
            f"{checkpoint.path} was written by {writer}/{by}, which {paper}/{script} does not evaluate; "
            f"run: python {writer}/{then.format(path=checkpoint.path)}"
        )


@dataclass(frozen=True)
class TrainedModels:
    """What a paper folder brings so that its checkpoints can be evaluated.

    build_model: (config, tokenizer) -> the model of a row with random weights.
    evaluate_all: (config, encoder, sets) -> evaluations by role.
    kind: `kind` in the state of its checkpoints; "" = models of captioned images.
    open_sets: config.data -> the sets of evaluate_all.
    training_only: beginnings of the names of tensors that exist only in training.
    """

    paper: str
    config_class: type
    build_model: Callable[[Any, Tokenizer], TwoTowers]
    evaluate_all: Callable[[Any, Encoder, EvaluationSets], dict[str, Evaluation]]
    kind: str = ""
    open_sets: Callable[[Any], Any] = open_evaluation_sets
    script: str = "evaluate.py"
    training_only: tuple[str, ...] = ()

    def load_encoder(
        self, checkpoint: Checkpoint, device: torch.device, overrides: Sequence[str] = (), config: Any = None
    ) -> tuple[Any, Encoder]:
        """Rebuilds config, model and preprocessing from a checkpoint.

        Args:
            overrides: "data.key=value" and "run.key=value".
            config: of the same run with today's settings of evaluation; None = the checkpoint's with the overrides.
        """
        loaded_files("weights", "evaluation")  # their hashes are those of now, whatever is edited meanwhile
        state = checkpoint.state
        check_writer(checkpoint, self.paper, self.kind, self.script)
        # weights fit one model only; an override of it would fail later with a message about shapes
        fixed = [text for text in overrides if not text.startswith(("data.", "run."))]
        if fixed:
            raise ConfigError(f"command line: {fixed[0]} would change a trained model; expected data.* or run.*")
        # the model is the trained one's; only where the data lie and how they are read may be another's
        trained = from_dict(self.config_class, state["config"], str(checkpoint.path / "state.json"))
        changed = override(trained, list(overrides))
        size = () if changed.data.source == "scenes" else ("image_size",)  # scenes are drawn of any size
        for name in ("resize", "context_length", "tokenizer", "vocabulary", "task", *size):  # task: of GeoMM's tasks
            if getattr(changed.data, name, None) != getattr(trained.data, name, None):
                raise ConfigError(f"command line: data.{name} would change what a trained model reads; leave it out")
        config = changed if config is None else config
        tokenizer = tokenizer_from_json(state["tokenizer"])
        model = self.build_model(trained, tokenizer)
        if state["geometry"] != model.geometry.name:
            raise CheckpointError(
                f"{checkpoint.path} was trained with geometry {state['geometry']!r}, its config builds "
                f"{model.geometry.name!r}"
            )
        checkpoint.load_model(model, self.training_only)
        transform = replace(ImageTransform.from_json(state["transform"]), resize_with=config.data.resize_with)
        return config, _encoder(model, transform, tokenizer, trained.data.context_length, config, device)

    def encoder_of(self, files: RunFiles, config: Any) -> Encoder:
        """The model of a finished run on this device; a frozen stem's features come from the cache of the training."""
        _, encoder = self.load_encoder(last_checkpoint(files.checkpoints), this_device(), config=config)
        return reading_features(encoder, config)

    def reevaluate(self, checkpoint: Checkpoint, config: Any, files: RunFiles, accelerator: Accelerator) -> None:
        """Evaluates a trained run again, after a change of evaluation code or test data."""
        _, encoder = self.load_encoder(checkpoint, accelerator.device, config=config)
        sets, state = self.open_sets(config.data), checkpoint.state
        if isinstance(sets, EvaluationSets):
            encoder = reading_features(encoder, config, sets.retrieval.values())
        evaluate_and_save(self, config, encoder, sets, files, state["step"], state, provenance_of())


def _encoder(
    model: TwoTowers,
    transform: ImageTransform,
    tokenizer: Tokenizer,
    context_length: int,
    config: Any,
    device: torch.device,
) -> Encoder:
    return Encoder(
        model.to(device).eval(),
        transform,
        tokenizer,
        context_length,
        config.run.evaluation_batch_size,
        device,
        config.run.num_workers,
        ranking_gb=config.run.ranking_gb,
        max_broken_share=config.data.max_broken_share,
    )


def reading_features(encoder: Encoder, config: Any, sets: Iterable[Pairs] = ()) -> Encoder:
    """The same encoder with a cache of its frozen stems' features; those of the captions of `sets` are computed now."""
    keep_captions(encoder.model, config, encoder.tokenizer, sets, encoder.device)
    return replace(encoder, cache=feature_cache(encoder.model, config, encoder.device))


def this_device() -> torch.device:
    """The accelerator where there is one, else the CPU."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")


# ---------------------------------------------------------------- from the model to its evaluations


def zero_shot_and_retrieval(config: Any, encoder: Encoder, sets: EvaluationSets) -> dict[str, Evaluation]:
    """Evaluates every set by role; config.method.prompt_average combines the prompts of a class."""
    average, gallery = config.method.prompt_average, config.data.gallery
    results = {name: evaluate_zero_shot(encoder, task, average) for name, task in sets.zero_shot.items()}
    return results | {
        role: evaluate_retrieval(encoder, pairs, gallery=gallery) for role, pairs in sets.retrieval.items()
    }


def evaluate_and_save(
    models: TrainedModels,
    config: Any,
    encoder: Encoder,
    sets: EvaluationSets,
    files: RunFiles,
    step: int,
    training: dict[str, Any],
    provenance: dict[str, str],
) -> None:
    """Evaluates on all processes and saves, see `save_evaluations`."""
    save_evaluations(models.paper, models.evaluate_all(config, encoder, sets), files, step, training, provenance)


# ---------------------------------------------------------------- commands


def command_line(description: str, checkpoint: str, published: bool = False) -> Parser:
    """Arguments of every command that evaluates.

    Args:
        published: adds --activation and --heads, for weights from elsewhere.
    """
    parser = Parser(description)
    parser.add_argument("--checkpoint", required=True, type=expanded, help=checkpoint)
    if published:
        parser.add_argument(
            "--activation",
            choices=("gelu", "quick_gelu"),
            help="of a file of weights without a config; OpenAI's files: quick_gelu",
        )
        parser.add_argument("--heads", type=heads_argument, default=NOT_STATED, metavar="IMAGE,TEXT", help=HEADS_HELP)
    output_help = "JSON file, default one in outputs/evaluations; - prints only the JSON"
    output = parser.add_mutually_exclusive_group()  # of both the last would count
    output.add_argument("--output", type=file_to_write, help=output_help)
    output.add_argument("--json", action="store_const", const=Path("-"), dest="output", help="the same as --output -")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="data.* and run.*: data.num_test=50")
    return parser


def evaluate_main(description: str, models: TrainedModels) -> None:
    """The command line of an evaluate.py, see `command_line`."""
    checkpoint = "a run, step-XXXXXXXX in it, a published model, or its name on the hub"
    options = command_line(description, checkpoint).parse_intermixed_args()
    join_processes(options.overrides)
    _evaluate_named(models, named_checkpoint(Path(options.checkpoint)), options)


def evaluate_if_run(models: TrainedModels, options: argparse.Namespace) -> bool:
    """Evaluates --checkpoint as evaluate.py does if it is a run of this repository; returns whether."""
    checkpoint = run_checkpoint(options.checkpoint)
    if checkpoint is not None:
        refuse_stated(options.checkpoint, options)
        _evaluate_named(models, checkpoint, options)
    return checkpoint is not None


def refuse_stated(name: str, options: argparse.Namespace) -> None:
    """Refuses what only weights from elsewhere need: a run records its layout, geometry, activation and heads.

    Raises:
        ConfigError: names the option.
    """
    for key in ("layout", "geometry", "activation", "heads"):
        if getattr(options, key, None) not in (None, NOT_STATED):
            raise ConfigError(f"--{key} has no effect on {name}, a run, which records its own; expected no --{key}")


def _evaluate_named(models: TrainedModels, checkpoint: Checkpoint, options: argparse.Namespace) -> None:
    content, results = evaluate_checkpoint(models, checkpoint, options.overrides)
    save_answer(content, results, options.checkpoint, options.output)


def evaluate_checkpoint(
    models: TrainedModels, checkpoint: Checkpoint, overrides: Sequence[str] = ()
) -> tuple[dict[str, Any], dict[str, Evaluation]]:
    """Content of the evaluation's file, and evaluations by role; see `load_encoder`."""
    # the test sets of the overridden config, the model of the trained one
    config, encoder = models.load_encoder(checkpoint, this_device(), overrides)
    results, state = models.evaluate_all(config, encoder, models.open_sets(config.data)), checkpoint.state
    return as_json(models.paper, results, state["step"], state, provenance_of()), results


def save_answer(content: dict[str, Any], results: dict[str, Evaluation], checkpoint: str, output: Path | None) -> None:
    """Writes evaluations as JSON and their hits beside it, and prints a summary, on the main process.

    Args:
        output: JSON file; None = one in outputs/evaluations, "-" = print the JSON and write nothing.
    """
    with ending_together():
        if is_main_process():
            _save_answer(content, results, checkpoint, output)


def _save_answer(content: dict[str, Any], results: dict[str, Evaluation], checkpoint: str, output: Path | None) -> None:
    if output == Path("-"):
        print(json.dumps(content, indent=1))
        return
    # the name depends on how the weights were read and on the protocol, so that no evaluation overwrites another
    if output is None:
        protocols = {role: result.protocol for role, result in results.items()}
        read = [content.get(key) for key in ("step", "layout", "geometry", "heads")]
        name = f"{'-'.join(Path(checkpoint).parts[-2:]).strip('/')}-{hash_of([checkpoint, read, protocols])}.json"
        output = outputs() / "evaluations" / content["paper"] / name
    # printed first: a file that cannot be written loses no headline number
    print(evaluation_text(content), flush=True)
    write_json(hits_beside(output), {role: result.hits for role, result in results.items()})
    write_json(output, content)
    print(f"all metrics and protocols: {shown(output)}")


def hits_beside(evaluation: Path) -> Path:
    """File of the hits of a command's evaluation."""
    return evaluation.with_name(f"{evaluation.stem}_hits.json")


# ---------------------------------------------------------------- published weights


def check_layout(checkpoint: str, layout: str, of_files: tuple[str, ...], of_folders: tuple[str, ...]) -> None:
    """Refuses an unknown layout, and a missing file where the layout takes one."""
    layouts = (*of_folders, *of_files)
    if layout not in layouts:
        raise ValueError(f"layout {layout!r}; expected one of: {', '.join(layouts)}")
    if layout in of_files and not Path(checkpoint).is_file():
        what = "is a folder" if Path(checkpoint).is_dir() else "does not exist"
        raise FileNotFoundError(f"{checkpoint} {what}; layout {layout} takes a file of weights")


def read_with(activation: str, results: dict[str, Evaluation]) -> dict[str, Evaluation]:
    """Adds the activation with which the weights were read to the protocols."""
    addition = {"activation": activation}
    return {role: replace(evaluation, protocol=evaluation.protocol | addition) for role, evaluation in results.items()}


def published_encoder(
    model: TwoTowers,
    tokenizer: Tokenizer,
    config: Any,
    device: torch.device,
    pixels: ImageTransform | None = None,
) -> Encoder:
    """The model in evaluation mode, with its preprocessing.

    Args:
        tokenizer: that the model was trained with.
        pixels: preprocessing that the weights state; None = CLIP's (shorter side scaled, centre cut), with a warning.
    """
    ids, rows = tokenizer.vocabulary_size, model.text_tower.vocabulary_size
    # CLIP's vocabulary, and rows behind it that no caption's id names
    has_added = ids < rows and model.text_tower.end_id == tokenizer.end_id == ids - 1
    if ids != rows and not has_added:
        raise ValueError(f"data.vocabulary has {ids} ids, the text tower of these weights {rows}; expected as many")
    if pixels is None:
        pixels = ImageTransform(model.image_tower.image_size, "crop")
        warnings.warn(
            f"the weights do not state their preprocessing; CLIP's is used ({pixels.mode}, "
            f"mean {pixels.mean}, std {pixels.std}); expected preprocess_cfg in open_clip_config.json, or "
            "preprocessor_config.json",
            stacklevel=2,
        )
    if pixels.size != model.image_tower.image_size:
        raise ValueError(
            f"the weights' preprocessing makes images of {pixels.size} pixels, their image tower takes "
            f"{model.image_tower.image_size}, in patches of {model.image_tower.patch_size}; expected the same size in "
            "their preprocessing file"
        )
    return _encoder(model.float(), pixels, tokenizer, model.text_tower.context_length, config, device)


def answer_of_published(
    paper: str, checkpoint: str, layout: str, encoder: Encoder, results: dict[str, Evaluation], output: Path | None
) -> None:
    """Writes and prints evaluations of published weights, as `save_answer`; of a path only the name is kept."""
    # a path of this machine does not belong into a file that is shared
    name = Path(checkpoint).name if Path(checkpoint).exists() else checkpoint
    weights = {"training_data": f"{name}{PUBLISHED}", "training_revision": "published weights"}
    settings = settings_of(encoder.model.image_tower) | settings_of(encoder.model.text_tower)
    heads = [settings[f"model.{side}.heads"] for side in ("image", "text")]
    facts = {"layout": layout, "geometry": encoder.model.geometry.name, "heads": heads}
    results = read_with(settings["model.image.activation"], results)
    save_answer({**facts, **as_json(paper, results, 0, weights, provenance_of())}, results, checkpoint, output)
