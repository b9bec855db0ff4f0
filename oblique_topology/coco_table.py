"""Table 7: the models of Table 2 on MSCOCO 1K and 5K, CxC and ECCV Caption; the user provides images and annotations.

    make reproduce-table7 SCALE=photos DATA=/data/flickr8k WEIGHTS=/data/weights \\
        SET="coco.root=/data/coco coco.test=dataset_coco.json#test coco.images=images coco.cxc=/data/sits_test.csv \\
        coco.eccv=/data/eccv_caption"
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

from accelerate import Accelerator

from common.base.fields import path_setting
from common.base.provenance import hash_of
from common.base.settings import DataConfig
from common.data.pairs import Pairs, open_retrieval_sets
from common.distributed import gather_objects, wait_for_everyone
from common.evaluation.coco import Relation, check_coco, evaluate_coco, read_cxc, read_eccv
from common.reproduce.rows import RowRun, is_current, read_run
from common.run.checkpoint import last_checkpoint, saved_weights
from common.run.evaluation_files import save_evaluations
from common.run.folder import RunFiles, provenance_of
from common.run.launch import start_accelerator
from oblique_topology.evaluate import PAPER, load_encoder

DECIDES = "evaluation"

NEEDED = (
    "MSCOCO's Karpathy test pictures: coco.test=<dataset_coco.json#test>, with coco.root, coco.images, coco.cxc and "
    "coco.eccv"
)


@dataclass(frozen=True)
class CocoFiles:
    """Paths of the test images and their annotations."""

    root: str = path_setting()  # folder that test and images start from
    test: str = path_setting()  # Karpathy's file of the 5,000 test images with "#test"; "" = Table 7 is not run
    images: str = path_setting()  # folder of the images, "" = beside the file
    cxc: str = path_setting()  # sits_test.csv of Crisscrossed Captions, "" = its columns stay empty
    eccv: str = path_setting()  # folder of ECCV Caption's JSON files, "" = its columns stay empty


@dataclass(frozen=True)
class CocoConfig:
    """Settings of `make reproduce-table7` beside those of a row: `coco.test=...`."""

    coco: CocoFiles = field(default_factory=CocoFiles)


@dataclass(frozen=True)
class CocoTest:
    """The opened files; `key` changes with their content."""

    pairs: Pairs
    relations: list[Relation]

    @property
    def key(self) -> str:
        # of both directions, as one need not mirror the other
        positives = [
            [one.title, sorted(one.captions_of_image.items()), sorted(one.images_of_caption.items())]
            for one in self.relations
        ]
        return hash_of([self.pairs.fingerprint, positives])

    @property
    def by_role(self) -> dict[str, Pairs]:
        """The roles of `evaluate_coco`, all on the same images."""
        return dict.fromkeys(["coco_5k", "coco_1k", *(relation.key for relation in self.relations)], self.pairs)


def open_coco(files: CocoFiles) -> CocoTest:
    """Opens the user's files; ValueError names one that is missing or of another form."""
    data = DataConfig(source="karpathy", root=files.root, test=files.test, images=files.images)
    relations = [read_cxc(Path(files.cxc))] if files.cxc else []
    relations += [read_eccv(Path(files.eccv))] if files.eccv else []
    pairs = open_retrieval_sets(data)["test"]
    check_coco(pairs, relations)
    return CocoTest(pairs, relations)


def coco_run(run: RowRun, test: CocoTest) -> RowRun:
    """The evaluations of a trained run on MSCOCO, read from the run's folder or made now."""
    identity = {**run.files.identity, "weights": saved_weights(run.files.checkpoints)}
    files = RunFiles(run.files.folder / f"coco-{test.key}", identity)
    accelerator: Accelerator = start_accelerator(replace(run.config.run, tracker="none"), files.folder)
    if not gather_objects(is_current(files, test.by_role))[0]:
        checkpoint = last_checkpoint(run.files.checkpoints)
        _, encoder = load_encoder(checkpoint, accelerator.device, config=run.config)
        results = evaluate_coco(encoder, test.pairs, test.relations)
        provenance = provenance_of()
        save_evaluations(PAPER, results, files, checkpoint.state["step"], checkpoint.state, provenance)
    wait_for_everyone()
    return replace(read_run(files, run.config), files=run.files, validation=run.validation)
