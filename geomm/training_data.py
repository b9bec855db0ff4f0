"""Table 8: images and captions of each set of the pre-training, ours below the paper's."""

from common.data.mixture import Mixture
from common.distributed import is_main_process
from common.report.table import MEASURED, Column, Row, Table, measured_over_seeds
from common.reproduce.command import Command
from common.reproduce.rows import PaperCode
from common.reproduce.tables import printed_rows, table_of

DECIDES = "evaluation"


def table8(command: Command, code: PaperCode) -> list[Table]:
    """Counts the training set of the pre-training rows, or the sets of its `data.mixture`."""
    command.refuse_search()
    if not is_main_process():
        return []
    data = code.config("albef.yaml", command.scale, command.overrides).data
    pairs, source, seeds = code.open_training(data, command.seeds[0]), code.printed("table8"), command.seeds[:1]
    rows = printed_rows(source, {})
    for part in getattr(pairs, "parts", [pairs]):
        counts = {"images": len(part), "texts": sum(1 for _ in Mixture([part], [1]).all_captions())}
        cells = {
            key: measured_over_seeds(
                [count / 1000], seeds, scale=command.scale, data="training sets", protocol="a count"
            )
            for key, count in counts.items()
        }
        rows.append(Row(part.name, {}, cells, MEASURED, "pre-trained on here"))
    columns = [
        Column(column["key"], column["label"], column["unit"], None, column["better"]) for column in source["columns"]
    ]
    return [table_of(command, code.name, "table8", columns, rows, {}, data=pairs.name)]
