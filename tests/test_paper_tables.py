"""The printed numbers of the papers: no cell changes by accident, and what is known of them holds."""

import json
import zlib

from common.base.files import read_repository_yaml
from common.base.places import PAPERS, ROOT
from common.reproduce.rows import words_of_plot

# checksum of the values of each table, as they were compared with the papers; whoever corrects a cell renews it
DIGESTS = {
    "contrastive_basics/table1": 1844233424,
    "contrastive_basics/self_supervised": 223132457,  # no number
    "euclip/table1": 3875499759,
    "euclip/table2": 755461306,
    "euclip/table3": 1509864531,
    "euclip/table4": 81982510,
    "euclip/table5": 1434077885,
    "euclip/table6": 3865791521,
    "euclip/table7": 816184971,
    "euclip/table8": 1720228566,
    "euclip/figure5": 2709412629,
    "euclip/root_norms": 3093213387,
    "euclip/reference": 942169792,
    "geomm/refcoco_plus": 727322937,
    "geomm/table1": 291495412,
    "geomm/table2": 3460925926,
    "geomm/table3": 3973468471,
    "geomm/table4": 860636644,
    "geomm/table5": 3033213654,
    "geomm/table6": 3889737240,
    "geomm/table7a": 3193632389,
    "geomm/table7b": 1363875331,
    "geomm/table7c": 1702555711,
    "geomm/table7d": 2800141892,
    "geomm/table8": 1830154669,
    "geomm/table9": 3172701304,
    "oblique_topology/table1": 2499081185,
    "oblique_topology/table2": 506125035,
    "oblique_topology/table3": 3948972936,
    "oblique_topology/table4": 3209921888,
    "oblique_topology/table5": 2634601377,
    "oblique_topology/table6": 1590100724,
    "oblique_topology/table7": 2928766101,
    "oblique_topology/table8": 1398188421,
    "oblique_topology/table9": 1152505460,
    "oblique_topology/table10": 4152085918,
    "oblique_topology/further_sets": 4098039160,
}


def tables_of(paper):
    return read_repository_yaml(ROOT / paper / "paper_tables.yaml")["tables"]


def test_no_printed_number_changes_by_accident():
    digests = {
        f"{path.parent.name}/{name}": zlib.crc32(json.dumps([row["values"] for row in table["rows"]]).encode())
        for path in sorted(ROOT.glob("*/paper_tables.yaml"))
        for name, table in tables_of(path.parent.name).items()
    }
    changed = dict(digests.items() - DIGESTS.items())
    assert digests == DIGESTS, (
        f"in DIGESTS, if the paper prints what changed, or a column without numbers is new: {changed}"
    )


def test_captions_of_the_oblique_papers_small_tables_were_ranked_over_4999():
    """All distinct t2i R@1 of Tables 3, 4 and 8 are multiples of 1 / 4,999, and all but one are none of 1 / 5,000."""
    tables = tables_of("oblique_topology")
    values = set()
    for name in ("table3", "table4", "table8"):
        place = [column["key"] for column in tables[name]["columns"]].index("zs_t2i_r1")
        values |= {row["values"][place] for row in tables[name]["rows"]}
    assert len(values) == 25

    def is_multiple(value, count):
        digits, nearest = len(str(value).split(".")[1]), round(value * count / 100)
        return any(round(100 * k / count, digits) == value for k in (nearest - 1, nearest, nearest + 1))

    assert all(is_multiple(value, 4999) for value in values)
    assert sum(is_multiple(value, 5000) for value in values) == 1


def test_plots_of_tables_that_a_paper_does_not_have_are_titled_where_such_a_table_is_committed():
    for paper in PAPERS:
        printed = read_repository_yaml(ROOT / paper / "paper_tables.yaml")
        for table_id, title in printed["paper"].get("titles", {}).items():
            assert table_id not in printed["tables"]
            assert list((ROOT / "results" / paper).glob(f"*/*/{table_id}.json"))
            assert words_of_plot(paper, table_id)["title"] == title
    assert words_of_plot("euclip", "stability")["title"].startswith("Loss at the end")
