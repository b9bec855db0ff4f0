"""DataComp's evaluation: its 38 scored sets, their main metrics, and the averages over groups of them."""

from collections.abc import Collection
from dataclasses import dataclass

DECIDES = "evaluation"


@dataclass(frozen=True)
class DataCompTask:
    """One of the 38 scored sets. group: imagenet, shifts, vtab, retrieval, or other (only in the average over 38)."""

    key: str
    name: str
    metric: str
    group: str
    size: int
    num_classes: int | None = None


DATACOMP_TASKS = (
    DataCompTask("imagenet1k", "ImageNet 1k", "acc1", "imagenet", 50_000, 1000),
    DataCompTask("imagenet_sketch", "ImageNet Sketch", "acc1", "shifts", 50_889, 1000),
    DataCompTask("imagenetv2", "ImageNet v2", "acc1", "shifts", 10_000, 1000),
    DataCompTask("imagenet-a", "ImageNet-A", "acc1", "shifts", 7_500, 200),
    DataCompTask("imagenet-o", "ImageNet-O", "acc1", "shifts", 2_000, 200),
    DataCompTask("imagenet-r", "ImageNet-R", "acc1", "shifts", 30_000, 200),
    DataCompTask("objectnet", "ObjectNet", "acc1", "shifts", 18_574, 113),
    DataCompTask("vtab/caltech101", "Caltech-101", "mean_per_class_recall", "vtab", 6_085, 102),
    DataCompTask("vtab/cifar100", "CIFAR-100", "acc1", "vtab", 10_000, 100),
    DataCompTask("vtab/clevr_count_all", "CLEVR Counts", "acc1", "vtab", 15_000, 8),
    DataCompTask("vtab/clevr_closest_object_distance", "CLEVR Distance", "acc1", "vtab", 15_000, 6),
    DataCompTask("vtab/dtd", "Describable Textures", "acc1", "vtab", 1_880, 47),
    DataCompTask("vtab/eurosat", "EuroSAT", "acc1", "vtab", 5_400, 10),
    DataCompTask("vtab/kitti_closest_vehicle_distance", "KITTI Vehicle Distance", "acc1", "vtab", 711, 4),
    DataCompTask("vtab/flowers", "Oxford Flowers-102", "mean_per_class_recall", "vtab", 6_149, 102),
    DataCompTask("vtab/pets", "Oxford-IIIT Pet", "mean_per_class_recall", "vtab", 3_669, 37),
    DataCompTask("vtab/pcam", "PatchCamelyon", "acc1", "vtab", 32_768, 2),
    DataCompTask("vtab/resisc45", "RESISC45", "acc1", "vtab", 6_300, 45),
    DataCompTask("vtab/svhn", "SVHN", "acc1", "vtab", 26_032, 10),
    DataCompTask("sun397", "SUN397", "acc1", "vtab", 108_754, 397),
    DataCompTask("retrieval/flickr_1k_test_image_text_retrieval", "Flickr", "mean_recall@1", "retrieval", 1_000),
    DataCompTask("retrieval/mscoco_2014_5k_test_image_text_retrieval", "MSCOCO", "mean_recall@1", "retrieval", 5_000),
    DataCompTask("misc/winogavil", "WinoGAViL", "jaccard_score_10-12", "retrieval", 3_563),
    DataCompTask("cifar10", "CIFAR-10", "acc1", "other", 10_000, 10),
    DataCompTask("country211", "Country211", "acc1", "other", 21_100, 211),
    DataCompTask("fgvc_aircraft", "FGVC Aircraft", "mean_per_class_recall", "other", 3_333, 100),
    DataCompTask("food101", "Food-101", "acc1", "other", 25_250, 101),
    DataCompTask("gtsrb", "GTSRB", "acc1", "other", 12_630, 43),
    DataCompTask("mnist", "MNIST", "acc1", "other", 10_000, 10),
    DataCompTask("voc2007", "Pascal VOC 2007", "acc1", "other", 14_976, 20),
    DataCompTask("renderedsst2", "Rendered SST2", "acc1", "other", 1_821, 2),
    DataCompTask("cars", "Stanford Cars", "acc1", "other", 8_041, 196),
    DataCompTask("stl10", "STL-10", "acc1", "other", 8_000, 10),
    DataCompTask("wilds/iwildcam", "iWildCam", "F1-macro_all", "other", 42_791, 182),
    DataCompTask("wilds/camelyon17", "Camelyon17", "acc1", "other", 85_054, 2),
    DataCompTask("wilds/fmow", "FMoW", "acc_worst_region", "other", 22_108, 62),
    DataCompTask("fairness/dollar_street", "Dollar Street", "acc_top5_wg", "other", 3_503, 58),
    DataCompTask("fairness/geode", "GeoDE", "acc_wg", "other", 12_488, 40),
)
DATACOMP_UNSCORED = ("fairness/fairface", "fairness/utkface")  # run by DataComp, without a main metric
DATACOMP_AVERAGES = {  # of DataComp and EuCLIP's tables -> groups of its members
    "imagenet": ("imagenet",),
    "shifts": ("shifts",),
    "vtab": ("vtab",),
    "retrieval": ("retrieval",),
    "all": ("imagenet", "shifts", "vtab", "retrieval", "other"),
}


def datacomp_averages(keys: Collection[str]) -> dict[str, tuple[DataCompTask, ...]]:
    """The tasks of each of `DATACOMP_AVERAGES`; an average is the plain mean over the main metrics of its tasks.

    Args:
        keys: of the tasks that there are results for.
    Raises:
        ValueError: fewer than the 38; names those that are missing.
    """
    known = [task.key for task in DATACOMP_TASKS]
    missing = [key for key in known if key not in keys]
    if missing:
        raise ValueError(
            f"{len(missing)} of DataComp's {len(known)} tasks are missing, and its averages are over all of them: "
            f"{', '.join(missing)}"
        )
    return {
        name: tuple(task for task in DATACOMP_TASKS if task.group in groups)
        for name, groups in DATACOMP_AVERAGES.items()
    }
