"""DataComp's table of sets, and averages that refuse to be over fewer of them."""

from refusals import refused

from euclip.datacomp import DATACOMP_TASKS, DATACOMP_UNSCORED, datacomp_averages


def test_datacomp_table_has_38_tasks_in_groups_of_the_published_sizes():
    groups = [task.group for task in DATACOMP_TASKS]
    assert (
        len(groups) == len({task.key for task in DATACOMP_TASKS}) == len({task.name for task in DATACOMP_TASKS}) == 38
    )
    sizes = {name: groups.count(name) for name in groups}
    assert sizes == {"imagenet": 1, "shifts": 6, "vtab": 13, "retrieval": 3, "other": 15}
    per_class = {task.name for task in DATACOMP_TASKS if task.metric == "mean_per_class_recall"}
    assert per_class == {"Caltech-101", "Oxford Flowers-102", "Oxford-IIIT Pet", "FGVC Aircraft"}
    averages = datacomp_averages([*(task.key for task in DATACOMP_TASKS), *DATACOMP_UNSCORED])
    assert averages["all"] == DATACOMP_TASKS


def test_missing_tasks_are_named_because_no_average_is_over_fewer_and_so_are_unknown_ones():
    keys = {task.key for task in DATACOMP_TASKS} - {"vtab/pcam", "cars"}
    refused(
        (r"2 of DataComp's 38 tasks are missing, .*: vtab/pcam, cars$", lambda: datacomp_averages(keys)),
        ("'imagenet' is no DataComp task; known: imagenet1k", lambda: datacomp_averages(["imagenet"])),
    )
