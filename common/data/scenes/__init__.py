"""Scenes: the embedded data set of drawn pictures with captions, made from a seed. See `docs/scenes.md`."""

from .captions import NUM_CAPTIONS, caption_statements, caption_texts
from .classification import CLASSIFICATION_TASKS, ClassificationTask, classification_task
from .dataset import SceneDataset
from .draw import render
from .negatives import hard_negative_pairs, hard_negatives
from .positives import (
    caption_positives,
    image_to_text_ceiling,
    matches,
    text_to_image_ceiling,
    text_to_image_ceilings,
)
from .splits import SPLITS
from .statements import Mention, Statement, describes, entails
from .tasks.dataset import ANNOTATION_TASKS, AnnotationTask, annotation_task
from .vocabulary import scene_words
from .world import Scene, SceneObject

__all__ = [
    "ANNOTATION_TASKS",
    "CLASSIFICATION_TASKS",
    "NUM_CAPTIONS",
    "SPLITS",
    "AnnotationTask",
    "ClassificationTask",
    "Mention",
    "Scene",
    "SceneDataset",
    "SceneObject",
    "Statement",
    "annotation_task",
    "caption_positives",
    "caption_statements",
    "caption_texts",
    "classification_task",
    "describes",
    "entails",
    "hard_negative_pairs",
    "hard_negatives",
    "image_to_text_ceiling",
    "matches",
    "render",
    "scene_words",
    "text_to_image_ceiling",
    "text_to_image_ceilings",
]
