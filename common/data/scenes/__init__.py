"""Scenes: the embedded data set of drawn images with captions, made from a seed. See `docs/scenes.md`."""
# ruff: noqa: F401

from common.data.scenes.classification import CLASSIFICATION_TASKS, ClassificationTask, classification_task
from common.data.scenes.dataset import SceneDataset
from common.data.scenes.draw import render
from common.data.scenes.positives import caption_positives, matches
from common.data.scenes.sampling import SPLITS
from common.data.scenes.statements import Mention, Statement, describes
from common.data.scenes.tasks.dataset import ANNOTATION_TASKS, AnnotationTask, annotation_task
from common.data.scenes.tasks.referring import ReferringScenes
from common.data.scenes.vocabulary import scene_words
from common.data.scenes.world import Scene, SceneObject
