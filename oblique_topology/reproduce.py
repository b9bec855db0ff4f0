"""Reproduces the tables of the oblique-topology paper: trains missing rows, prints results beside the paper's numbers.

make reproduce-table2                                        scenes at demo scale, one seed
make reproduce-table2 SCALE=photos DATA=/data/flickr8k WEIGHTS=/data/weights SEEDS=3
make reproduce-table3 SEEDS=3                                four topologies, four settings of the temperature
python oblique_topology/reproduce.py table2 --scale smoke --output outputs
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from common.base.config import ConfigError
from common.distributed import is_main_process
from common.evaluation.protocol import data_text
from common.evaluation.retrieval import RECALL_AT
from common.report.table import MEASURED, Column, Measured, Row, Table, measured_over_seeds
from common.reproduce.command import Command, reproduce_main
from common.reproduce.findings import Findings, findings_table
from common.reproduce.rows import PaperCode, RowRun
from common.reproduce.tables import (
    NOT_CHOSEN,
    Runs,
    collapse_note,
    columns_of,
    measured_cell,
    measured_cells,
    note_of,
    plot_runs,
    printed_rows,
    ran_as,
    stand_in_for,
    table_of,
    train_rows,
    trained_table,
    with_custom_rows,
)
from common.run.launch import run_or_explain
from oblique_topology import (
    class_token_cost,
    distance_distributions,
    equilibrium,
    loss_landscape,
    low_precision,
    noise,
    temperature_curves,
    temperature_order,
    temperature_rate,
    token_maps,
)
from oblique_topology.coco_table import NEEDED, CocoConfig, coco_run, open_coco
from oblique_topology.config import Config
from oblique_topology.evaluate import PAPER, evaluated_sets, reevaluate
from oblique_topology.loaded_rows import trained_model
from oblique_topology.temperature import final_logit_scales, temperature_cells
from oblique_topology.token_subsets import NUM_DRAWS, subset_hits
from oblique_topology.topology_table import TOPOLOGIES, properties
from oblique_topology.train import train

DECIDES = "nothing"

CODE = PaperCode(PAPER, Config, train, reevaluate, open_tests=evaluated_sets)
# Table 10 has 16 class tokens; at paper scale the row already has these settings
SIXTEEN_TOKENS = ("model.embedding_dim=512", "method.num_spheres=16", "method.logit_scale_max=3.95")
MULTI = "CLIP [Multi(32, 16)], ViT-B/16"
CLIP_TRAINED_HERE = "CLIP [our-impl.], ViT-B/16"


def table1(command: Command) -> list[Table]:
    """Table 1: the properties of the topologies, measured on random points; trains nothing and takes no settings."""
    command.refuse_search()
    if command.changes:
        raise ConfigError(f"{command.part} takes no settings, got {' '.join(command.changes)}")
    source = CODE.printed("table1")
    ours = {}
    for row in source["rows"]:
        measured = [properties(TOPOLOGIES[row["method"]], seed) for seed in command.seeds]
        values = {key: [point[key] for point in measured] for key in measured[0]}
        ours[row["method"]] = (_over_seeds(command, values, "random points"), "")
    return [table_of(command, PAPER, "table1", _columns(source), printed_rows(source, ours), {})]


def table2(command: Command) -> list[Table]:
    """Table 2: large-scale zero-shot classification and retrieval; all recalls; where the temperature ends."""
    table, runs = _trained(command, "table2")
    has_both = not command.changes and is_main_process()
    recalls = _all_recalls(command, runs)
    return [table, recalls, *([_final_temperature(command, runs, recalls)] if has_both else [])]


def table4(command: Command) -> list[Table]:
    """Table 4: number of spheres and class tokens at 512 numbers; all rows use towers with class tokens."""
    towers = towers_with_tokens(command)
    return _table(
        command, "table4", {row["method"]: towers for row in with_custom_rows(command, CODE.printed("table4"))["rows"]}
    )


def towers_with_tokens(command: Command) -> list[str]:
    """Tower settings of rows with several class tokens at a scale; other rows may have no transformers."""
    config = _config(command, "ablation_multi_64_8.yaml")
    data, model = config.data, config.model
    return [
        f"data.tokenizer={data.tokenizer}",
        f"data.vocabulary={data.vocabulary}",
        f"model.image.layers={model.image.layers}",
        f"model.text.layers={model.text.layers}",
        f"model.text.stem.weights={model.text.stem.weights}",
    ]


def table5(command: Command) -> list[Table]:
    """Table 5: the settings, ours at the command's scale beside the paper's; trains nothing."""
    source = with_custom_rows(command, CODE.printed("table5"))
    ours = {}
    for row in source["rows"]:
        if not command.trains(row["config"]):
            continue
        config = _config(command, row["config"])
        settings = {
            "batch_size": config.optim.global_batch_size,
            "class_tokens": config.num_class_tokens,
            "projection_dim": config.model.embedding_dim // config.num_class_tokens,
            "maximum_temperature": config.method.logit_scale_max,
            "weight_decay": config.optim.weight_decay,
            "warmup_steps": config.optim.warmup_steps,
            "learning_rate": config.optim.learning_rate,
            "beta1": config.optim.beta1,
            "beta2": config.optim.beta2,
            "epsilon": config.optim.epsilon,
            "max_gradient_norm": config.optim.max_gradient_norm,
        }
        values = {key: [value] * len(command.seeds) for key, value in settings.items()}
        ours[row["method"]] = (_over_seeds(command, values, "settings"), f"ours: {config.structure}")
    return [table_of(command, PAPER, "table5", _columns(source), printed_rows(source, ours), {})]


def table6(command: Command) -> list[Table]:
    """Table 6: the final temperature of Table 3's runs, and the step from which it is constant; from their logs."""
    source = with_custom_rows(command, CODE.printed("table6"))
    configs = {row["method"]: row["config"] for row in source["rows"]}
    runs = train_rows(command, CODE, configs)
    ours = {
        method: (
            temperature_cells(seeds, _config(command, configs[method]), command.scale),
            _note(command, configs[method]) + collapse_note(seeds),
        )
        for method, seeds in runs.items()
    }
    return [table_of(command, PAPER, "table6", _columns(source), printed_rows(source, ours), runs)]


def table7(command: Command) -> list[Table]:
    """Table 7: the models of Table 2 on MSCOCO 1K and 5K, CxC and ECCV Caption, if the user provides the files."""
    source = with_custom_rows(command, CODE.printed("table7"))
    options, command = command.split(CocoConfig)
    files = options.coco
    configs = {row["method"]: row["config"] for row in source["rows"] if "config" in row}
    runs: Runs = {}
    if files.test:
        test = open_coco(files)
        trained_runs = train_rows(command, CODE, configs)
        runs = {method: [coco_run(run, test) for run in seeds] for method, seeds in trained_runs.items()}

    def status(row: Mapping[str, Any]) -> str:
        left_out = "config" in row and not command.trains(row["config"])
        return NOT_CHOSEN if left_out else f"not run: needs {row.get('needs', NEEDED)}"

    ours = {
        method: (measured_cells(source, seeds, command.scale), _note(command, configs[method]))
        for method, seeds in runs.items()
    }
    rows = printed_rows(source, ours, status)
    return [table_of(command, PAPER, "table7", columns_of(command, source, runs), rows, runs)]


def table9(command: Command) -> list[Table]:
    """Table 9: TCL on two spheres; its rows are configs of geomm/, which implements TCL."""
    if not command.runs_at(("smoke", "demo", "paper"), "nothing there stands for MSCOCO to train on"):
        return []
    return [trained_table(command, CODE, "table9", fields=("flickr",))[0]]


def table10(command: Command) -> list[Table]:
    """Table 10: ImageNet accuracy of Multi with 16 class tokens when a random part of them is summed."""
    source = CODE.printed("table10")
    (config,) = {row["config"] for row in source["rows"]}
    sixteen = replace(command, overrides=(*SIXTEEN_TOKENS, *command.overrides))
    if "imagenet" not in evaluated_sets(_config(sixteen, config).data):
        return [_not_run(command, "table10", "a labelled set called imagenet (data.labelled)")]
    runs = train_rows(sixteen, CODE, {MULTI: config})
    sizes = {row["method"]: int(row["method"].split()[0]) for row in source["rows"]}
    hits = [_subset_hits(run, list(sizes.values())) for run in runs[MULTI]]
    ours = {
        method: (
            _subset_cells(command, runs[MULTI], [seed_hits[size] for seed_hits in hits]),
            f"{_note(sixteen, config)}; {len(hits[0][size])} sets of tokens",
        )
        for method, size in sizes.items()
    }
    plot_runs(command, PAPER, {ran_as("{config.structure}, {vit}", runs[MULTI][0].config): runs[MULTI]})
    return [table_of(command, PAPER, "table10", columns_of(command, source, runs), printed_rows(source, ours), runs)]


def further_sets(command: Command) -> list[Table]:
    """Version B's further sets: the models of Table 2 on the labelled sets that the user provides by name."""
    source = CODE.printed("further_sets")
    names = [column["key"] for column in source["columns"]]
    data = _config(command, source["rows"][0]["config"]).data
    if not evaluated_sets(data).keys() & set(names):
        return [_not_run(command, "further_sets", f"labelled sets called {names[0]}, {names[1]}, ... (data.labelled)")]
    return _table(command, "further_sets")


def _table(command: Command, table_id: str, settings: Mapping[str, Sequence[str]] = {}) -> list[Table]:
    """Only a table of trained rows."""
    return [_trained(command, table_id, settings)[0]]


PARTS = {
    "table1": table1,
    "table2": table2,
    "table3": partial(_table, table_id="table3"),
    "table4": table4,
    "table5": table5,
    "table6": table6,
    "table7": table7,
    "table8": partial(_table, table_id="table8"),
    "table9": table9,
    "table10": table10,
    "further_sets": further_sets,
    "figure4": partial(temperature_curves.figure4, code=CODE),
    "figure5": partial(token_maps.figure5, code=CODE),
    "figure6": partial(distance_distributions.figure6, code=CODE),
    "equilibrium": partial(equilibrium.equilibrium, code=CODE),
    "noise": partial(noise.noise, code=CODE),
    "temperature_order": partial(temperature_order.temperature_order, code=CODE),
    "temperature_rate": partial(temperature_rate.temperature_rate, code=CODE),
    "low_precision": partial(low_precision.low_precision, code=CODE),
    "loss_landscape": partial(loss_landscape.loss_landscape, code=CODE),
    "class_token_cost": partial(class_token_cost.class_token_cost, code=CODE),
}


def main(arguments: list[str] | None = None) -> None:
    reproduce_main(__doc__, PAPER, PARTS, arguments)


def _not_run(command: Command, table_id: str, needed: str) -> Table:
    """A table without results, whose status names the missing data."""
    source = CODE.printed(table_id)
    rows = printed_rows(source, {}, lambda row: f"not run: needs {needed}")
    return table_of(command, PAPER, table_id, columns_of(command, source, {}), rows, {})


def _trained(command: Command, table_id: str, settings: Mapping[str, Sequence[str]] = {}) -> tuple[Table, Runs]:
    """`trained_table` with the trained structure in each row's note."""
    return trained_table(command, CODE, table_id, _note, settings)


def _config(command: Command, row: str) -> Config:
    return CODE.config(row, command.scale, [*command.overrides, *command.settings_of(row)])


def _note(command: Command, row: str) -> str:
    """The trained experiment of a row in one line, structure first."""
    config = _config(command, row)
    rate = config.optim.logit_scale_rate
    learns = config.method.logit_scale_trainable and rate != 1
    faster = f"; the temperature learns {rate:g} times as fast as the weights" if learns else ""
    return f"ours: {config.structure}; {note_of(command, row, CODE).removeprefix('ours: ')}{faster}"


def _columns(source: Mapping[str, Any]) -> list[Column]:
    """The columns of a table without a test set."""
    return [
        Column(column["key"], column["label"], column.get("unit", "percent"), better=column.get("better", "higher"))
        for column in source["columns"]
    ]


def _over_seeds(command: Command, values: Mapping[str, list], data: str) -> dict[str, Measured | None]:
    """Cells without a test set; None where a value is None."""
    return {
        what: None
        if numbers[0] is None
        else measured_over_seeds(
            numbers,
            command.seeds,
            scale=command.scale,
            data=data,
            protocol=what,
            full_protocol={"task": data, "what": what},
        )
        for what, numbers in values.items()
    }


def _all_recalls(command: Command, runs: Runs) -> Table:
    """R@1, R@5 and R@10 in both directions of every trained row; Table 2 prints their mean."""
    measures = [
        (role, f"{direction}_recall_at_{k}", f"{direction} R@{k}")
        for role in ("test", "second_test")
        if any(role in seeds[0].evaluations for seeds in runs.values())
        for direction in ("i2t", "t2i")
        for k in RECALL_AT
    ]
    columns = [
        Column(f"{role}_{metric}", label, stands_in_for=stand_in_for(command, runs, role))
        for role, metric, label in measures
    ]
    rows = [
        Row(
            method,
            {},
            {f"{role}_{metric}": measured_cell(seeds, role, metric, command.scale) for role, metric, _ in measures},
            MEASURED,
        )
        for method, seeds in runs.items()
    ]
    caption = "Retrieval in full of the rows trained here."
    return table_of(command, PAPER, "table2", columns, rows, runs, "_recalls", caption=caption)


def _final_temperature(command: Command, runs: Runs, recalls: Table) -> Table:
    """experiment["final_temperature"]["clip" or "multi_32_16"] of claim C31: the final multiplier."""
    rows = {"clip": CLIP_TRAINED_HERE, "multi_32_16": MULTI}
    findings = Findings(
        name="final_temperature",
        caption="Where the temperature of the runs of Table 2 ends; at demo and photos scale Multi has fewer spheres.",
        protocol="logit scale of the last update",
        settings={"task": "temperature", "rule": "logit scale of the last update"},
        rows=rows,
        columns={"": ("final multiplier", "multiplier", None)},
        values={(row, ""): final_logit_scales(runs[method]) for row, method in rows.items()},
    )
    table = findings_table(command, PAPER, findings, {method: runs[method] for method in rows.values()})
    ran = {row.method: row.ran for row in recalls.rows}  # sizes other than in print
    rows = [replace(row, ran=ran[row.method]) for row in table.rows]
    return replace(table, table_id="table2_temperature", experiment=findings.name, rows=rows)


def _subset_hits(run: RowRun, sizes: list[int]) -> dict[int, torch.Tensor]:
    config, encoder = trained_model(run)
    tests, average = evaluated_sets(config.data), config.method.prompt_average
    return subset_hits(encoder, tests["imagenet"], sizes, average)


def _subset_cells(command: Command, runs: list[RowRun], hits: list[torch.Tensor]) -> dict[str, Measured]:
    """Mean and standard deviation over draws, in percent; hits has (num_draws, num_images) per seed."""
    protocol = runs[0].evaluations["imagenet"]["protocol"] | {"tokens": f"random sets, at most {NUM_DRAWS} of a size"}
    accuracies = [100 * draws.double().mean(dim=1) for draws in hits]
    columns = {
        "acc1_mean": [float(draws.mean()) for draws in accuracies],
        "acc1_spread": [float(draws.std(correction=0)) for draws in accuracies],
    }
    return {
        key: measured_over_seeds(
            values,
            [run.seed for run in runs],
            scale=command.scale,
            data=data_text(protocol),
            protocol=f"num_images {protocol['num_images']}, num_classes {protocol['num_classes']}, "
            f"{protocol['tokens']}",
            full_protocol=protocol,
        )
        for key, values in columns.items()
    }


if __name__ == "__main__":
    run_or_explain(main)
