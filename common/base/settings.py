"""The sections that every paper's config shares: data, model, optimiser, run."""

import dataclasses
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from common.base.arguments import multiples_beside, some
from common.base.fields import Decides, TakenBy, path_setting, refuse_not_taken, setting
from common.base.values import ConfigError

# how the prompts of a class are combined, see common/evaluation/zero_shot.py
PromptAverage = Literal["scores", "embeddings", "normalized_mean", "plain_mean", "tangent_mean"]

# sources of captioned images beside shards -> what data.train and the others name there
CAPTION_FILES = {
    "karpathy": "a JSON file of captions, e.g. dataset_coco.json",
    "tsv": "a table of path and caption, e.g. captions.tsv",
    "folder": "a folder of images with NAME.txt beside each, e.g. train",
    "hugging_face": "a folder, files, or a name on the hub",
}
_PHOTOGRAPHS = ("shards", *CAPTION_FILES)


# fields of DataConfig that not every source takes -> the sources that do
TAKEN_BY = {
    **dict.fromkeys(("val", "val_share", "test", "second_test"), _PHOTOGRAPHS),
    **dict.fromkeys(("min_word_count", "max_words", "augmentation"), _PHOTOGRAPHS),
    "images": tuple(name for name in CAPTION_FILES if name != "folder"),
    "image_column": ("tsv", "hugging_face"),
    "caption_column": ("tsv", "hugging_face"),
    "stream_buffer": ("hugging_face",),
    **dict.fromkeys(("num_train", "num_test", "gallery", "num_labelled"), ("scenes",)),
    **dict.fromkeys(("caption_noise", "ambiguity", "num_captions"), ("scenes",)),
}


# the same for the tokenizer
TAKEN_BY_TOKENIZER = dict.fromkeys(("min_word_count", "max_words"), ("words",))


# fields of DataConfig that name or count something inside one source, and mean nothing inside another
NAMES_IN_A_SOURCE = ("train", "val", "test", "second_test", "images", "image_column", "caption_column", "num_val")


Source = Literal["scenes", *_PHOTOGRAPHS]
SCENES_TO_TRAIN_ON = ("train", "train_crowded", "train_referring")


@dataclass(frozen=True)
class MixedSet:
    """One training set of `data.mixture`. Keys mean the same as in `data`, whose values stand in for missing ones."""

    weight: float = setting(1.0, above=0.0)  # samples of it for each of a set with weight 1; counts in thousandths
    source: Source | None = None
    root: str | None = path_setting(None)  # below data.root unless it is a full path
    train: str | None = path_setting(None)
    images: str | None = path_setting(None)
    image_column: str | None = None
    caption_column: str | None = setting(None)
    stream_buffer: int | None = setting(None, at_least=0)
    num_train: int | None = setting(None, at_least=1)
    caption_noise: float | None = setting(None, at_least=0.0, at_most=1.0)
    ambiguity: float | None = setting(None, at_least=0.0, at_most=1.0)

    def as_data(self, data: "DataConfig") -> "DataConfig":
        """The config of this set alone, as if its source were chosen over `data` on the command line."""
        values = {
            key: value for key, value in dataclasses.asdict(self).items() if value is not None and key != "weight"
        }
        source = values.get("source", data.source)
        others = set(NAMES_IN_A_SOURCE) if source != data.source else set()
        others |= {name for name, takers in TAKEN_BY.items() if source not in takers}
        inherited = {key: getattr(data, key) for key in dataclasses.asdict(self).keys() - others - {"weight"}}
        values["root"] = str(Path(data.root) / Path(values["root"]).expanduser()) if "root" in values else data.root
        shared = {name: getattr(data, name) for name in ("image_size", "max_broken_share")}
        if source == "scenes":
            shared["num_captions"] = data.num_captions
        return DataConfig(**shared, **(inherited | values))


@dataclass(frozen=True)
class DataConfig:
    """Which pairs to train on and to rank, and how pixels and words become tensors.

    A key that the source or tokenizer does not take (`TAKEN_BY`) stays at its default. A file or command line that
    chooses another source resets such keys, and the names of files, folders and columns.
    """

    taken_by: ClassVar[dict[str, TakenBy]] = {"source": TAKEN_BY, "tokenizer": TAKEN_BY_TOKENIZER}
    # the embedded world; tar shards; Karpathy's and similar JSON files; tables of path and caption;
    # images with a text beside each; Hugging Face sets
    source: Source = "scenes"
    root: str = path_setting(decides="nothing")  # folder that the names below start from
    # scenes: "" = train, or train_crowded and train_referring, which stand for COCO and RefCOCO+ (without boxes);
    # shards: braces and globs, e.g. "{00000..01287}.tar", "" = "*train*.tar"; karpathy, tsv: a file; folder: a folder;
    # hugging_face: a folder, files, or a name on the hub. karpathy and hugging_face: "#split" may follow, else the
    # role's own split
    train: str = path_setting(decides="nothing")
    # as train; ranked during training. "": shards "*val*.tar"; karpathy, hugging_face as data.train
    val: str = path_setting(decides="nothing")
    # instead of data.val: share of the training images that is held out, by a hash of their ids
    val_share: float = setting(0.0, at_least=0.0, below=1.0, decides="nothing")
    test: str = path_setting(decides="nothing")  # as val; ranked at the end
    second_test: str = path_setting(decides="nothing")  # a second test set, "" = none
    # several training sets instead of data.train, e.g. [{train: a.tsv, weight: 3}, {source: shards, root: /data/b}]
    mixture: tuple[MixedSet, ...] = setting((), decides="nothing")
    images: str = path_setting(decides="nothing")  # folder of the images, "" = searched beside the file
    image_column: str = ""  # of the image or its path, "" = by the usual names
    caption_column: str = setting("")  # of the captions; several are separated by commas: "caption_0,caption_1"
    stream_buffer: int = setting(0, at_least=0)  # rows in which a training stream is shuffled, 0 = none
    # folder of labelled sets for zero-shot classification, one folder each, "" = none
    labelled: str = path_setting(decides="nothing")
    num_train: int = setting(50_000, at_least=1)  # images in one epoch
    # images that are ranked, and classified, during training; of files evenly spaced ones. null = all; of scenes 500
    num_val: int | None = setting(None, at_least=1, decides="nothing")
    num_test: int = setting(1_000, at_least=1, decides="evaluation")  # images of each retrieval test set
    # test images ranked together, null = all num_test
    gallery: int | None = setting(None, at_least=2, decides="evaluation")
    # images of each zero-shot classification set
    num_labelled: int = setting(1_000, at_least=1, decides="evaluation")
    caption_noise: float = setting(0.0, at_least=0.0, at_most=1.0)  # share of shuffled training pairs
    ambiguity: float = setting(0.0, at_least=0.0, at_most=1.0)  # share of training captions made ambiguous
    # share of the training images that get the caption of another one (common/data/partners.py), of any source
    partner_noise: float = setting(0.0, at_least=0.0, at_most=1.0)
    partners_drawn: Literal["every_batch", "once"] = "every_batch"  # once: the same wrong pairs in every epoch
    num_captions: int = setting(5, at_least=1, at_most=5)  # of an image; the fifth ("some things") fits many images
    image_size: int = setting(48, at_least=8)  # pixels
    resize: Literal["squeeze", "crop"] = "crop"  # evaluation: squeeze to a square, or shortest side + centre crop
    # of photographs: torchvision is faster; its levels differ from Pillow's by 0.004 on average
    resize_with: Literal["pillow", "torchvision"] = "pillow"
    crop_scale: tuple[float, float] | None = None  # training: share of the area of a random crop, null = as evaluation
    # training, behind the crop: ALBEF's mirror images and RandAugment; TCL's colours, grey and blur before them
    augmentation: Literal["none", "albef", "tcl"] = "none"
    # words: those of the training captions; albef_wordpiece: bert_wordpiece of captions that are cleaned as in ALBEF
    tokenizer: Literal["words", "clip_bpe", "bert_wordpiece", "albef_wordpiece"] = "words"
    # clip_bpe, *_wordpiece: file, folder or hub name; "" = open_clip's file, bert-base-uncased
    vocabulary: str = path_setting(decides="nothing")
    context_length: int = setting(32, at_least=3)  # tokens, class and end token included
    min_word_count: int = setting(2, at_least=1)  # words: rarer ones of the training captions are unknown
    max_words: int | None = setting(None, at_least=5)  # words: size of the vocabulary, null = no bound
    # stop above this share of broken samples
    max_broken_share: float = setting(0.01, at_least=0.0, at_most=1.0, decides="nothing")

    def __post_init__(self) -> None:
        refuse_not_taken(self, "data", self.taken_by)
        if self.source == "scenes" and self.train not in ("", *SCENES_TO_TRAIN_ON):
            raise ValueError(
                f"data.train = {self.train!r} with data.source = scenes; expected one of: "
                f"{', '.join(SCENES_TO_TRAIN_ON)}"
            )
        if self.train == "train_referring" and (self.caption_noise or self.ambiguity):
            raise ValueError(
                "data.caption_noise and data.ambiguity have no effect with data.train = train_referring; expected: 0"
            )
        if self.partner_noise and (self.mixture or self.stream_buffer):
            raise ValueError(
                f"data.partner_noise = {self.partner_noise} with data.mixture or data.stream_buffer; expected: 0, or "
                "one training set that is read by index"
            )
        if self.mixture and self.val_share:
            raise ValueError(f"data.val_share = {self.val_share} with data.mixture; expected data.val")
        for number, part in enumerate(self.mixture, start=1):
            try:
                part.as_data(self)
            except ValueError as error:
                raise ValueError(f"data.mixture, set {number}: {error}") from None
        if self.gallery is not None and self.num_test > self.gallery and self.num_test % self.gallery:
            raise ValueError(
                f"data.num_test = {self.num_test} makes no whole galleries of data.gallery = {self.gallery}; expected: "
                "a multiple of it, or data.gallery=null to rank all together"
            )
        if self.crop_scale is not None and not 0.0 < self.crop_scale[0] <= self.crop_scale[1] <= 1.0:
            raise ValueError(
                f"data.crop_scale = {list(self.crop_scale)}; expected: smallest and largest share, in this order, both "
                "above 0 and at most 1"
            )

    @property
    def validation_size(self) -> int | None:
        """Images that are ranked during training; None = all."""
        return 500 if self.num_val is None and self.source == "scenes" else self.num_val


@dataclass(frozen=True)
class TowerConfig:
    """Size of one transformer, and the weights that it starts from.

    `lock` freezes only what the weights have filled, so a new projection always trains: all of the tower, or the
    embeddings and this many of the lowest layers.
    """

    width: int = setting(128, at_least=1, at_most=65_536)
    layers: int = setting(2, at_least=1)
    heads: int = setting(4, at_least=1)
    mlp_ratio: float = setting(4.0, above=0.0)
    # of the MLPs; null = the initial weights', else gelu
    activation: Literal["gelu", "quick_gelu"] | None = setting(None, from_weights=True)
    # of every LayerNorm; null = the initial weights', else 1e-5
    norm_eps: float | None = setting(None, above=0.0, from_weights=True)
    # weights to start from: file, folder, run or hub name; "" = model.init
    init: str = path_setting(decides="nothing")
    lock: Literal["all"] | int | None = setting(None, at_least=0)  # gets no gradient; 0 = only the embeddings


@dataclass(frozen=True)
class StemConfig:
    """A pre-trained timm network whose features stand in for the patches (common/encoders/stem.py)."""

    name: str = ""  # as timm has it, e.g. tf_efficientnet_lite0; "" = none, pixels are cut into patches
    # file or folder in timm's layout; "" = timm's own, from the hub; not read with an init
    weights: str = path_setting(decides="nothing")
    trainable: bool = False  # false: frozen, and its features computed once and cached on disk
    # of its training's pixels; null = as config.json or timm has it
    mean: tuple[float, float, float] | None = setting(None, from_weights=True)
    std: tuple[float, float, float] | None = setting(None, from_weights=True)
    dropout: float = setting(0.0, at_least=0.0, below=1.0)  # share of its channels a training image loses
    # of a training image, cached: the evaluation view; that and its mirror image; so many crops by data.crop_scale
    views: Literal["centre", "mirror"] | int = setting("centre", at_least=1)
    # largest file set of one data set; 0 = computed in every step
    cache_gb: float = setting(20.0, at_least=0.0, decides="nothing")

    def __post_init__(self) -> None:
        # dropout may come from a scale whose stem a row or the user replaces by pixels
        of_network = dict.fromkeys(("weights", "trainable", "mean", "std", "views"), ())
        refuse_not_taken(self, "model.image.stem", {"name": of_network})
        if (self.mean is None) != (self.std is None):
            mean, std = ("null" if values is None else list(values) for values in (self.mean, self.std))
            raise ValueError(
                f"model.image.stem.mean = {mean} with model.image.stem.std = {std}; expected: both, or null for both"
            )


@dataclass(frozen=True)
class ImageTowerConfig(TowerConfig):
    """The image tower's."""

    layers: int = setting(4, at_least=0)  # 0: the mean over a stem's places stands for an image
    projection: bool = True  # False, without layers: the mean itself is the embedding, and nothing of it trains (LiT)
    stem: StemConfig = field(default_factory=StemConfig)

    @property
    def has_cache(self) -> bool:
        return bool(self.stem.name) and not self.stem.trainable and self.stem.cache_gb > 0


@dataclass(frozen=True)
class TextStemConfig:
    """A pre-trained BERT whose tokens stand in for the word embeddings (common/encoders/text_stem.py)."""

    # folder or hub name; "" = none, words are embedded from scratch
    weights: str = path_setting(decides="nothing")
    # lowest ones taken; 0 = only the embeddings, null = all
    layers: int | None = setting(None, at_least=0, from_weights=True)
    # null = the weights'; written down so that a checkpoint can do without them
    width: int | None = setting(None, at_least=1, from_weights=True)
    heads: int | None = setting(None, at_least=1, from_weights=True)
    mlp_ratio: float | None = setting(None, above=0.0, from_weights=True)
    trainable: bool = False  # false: frozen, and its tokens computed once and cached on disk
    # largest file of one network; 0 = computed in every step
    cache_gb: float = setting(20.0, at_least=0.0, decides="nothing")

    def __post_init__(self) -> None:
        of_network = dict.fromkeys(("layers", "width", "heads", "mlp_ratio", "trainable"), ())
        refuse_not_taken(self, "model.text.stem", {"weights": of_network})


@dataclass(frozen=True)
class TextTowerConfig(TowerConfig):
    """The text tower's."""

    layers: int = setting(2, at_least=0)  # 0: the mean over a stem's words stands for a caption
    # share of the numbers that training sets to 0, as in BERT: of embeddings, of attention weights, of each layer's
    # branches; also in the layers that read on from this tower (fusion, decoder of answers); not in a stem
    dropout: float = setting(0.0, at_least=0.0, below=1.0)
    stem: TextStemConfig = field(default_factory=TextStemConfig)

    @property
    def has_cache(self) -> bool:
        return bool(self.stem.weights) and not self.stem.trainable and self.stem.cache_gb > 0


@dataclass(frozen=True)
class StartConfig:
    """The weights that a run starts from: a BERT's, and over them those of runs of other rows, same scale and seed."""

    row: str = ""  # stem of its file in configs/; "" = none. It is trained first where it is missing
    part: Literal["towers", "all"] = "all"  # towers: with their projections and the temperature
    run: str = path_setting(decides="nothing")  # its folder, filled in by whoever finds or trains it
    scale_factor: float = setting(1.0, above=0.0)  # of its logit scale: 1 / m where similarities range to m, not to 1
    discriminator: str = ""  # stem of another row whose matching head judges pairs (MAFA)
    discriminator_run: str = path_setting(decides="nothing")  # its folder
    # a BERT: lower layers for the text tower, upper ones for a fusion transformer, if there is one
    bert: str = path_setting()

    def __post_init__(self) -> None:
        if self.scale_factor != 1 and not (self.row or self.run):
            raise ValueError(
                f"start.scale_factor = {self.scale_factor} without start.row or start.run, whose logit scale it is of; "
                "expected: 1"
            )


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of both towers and of the embedding, and the weights that both start from."""

    # folder in which weights and vocabularies lie under their names; "" = the hub's
    weights: str = path_setting(decides="nothing")
    # weights to start from: file, folder, run or hub name of a model with both towers; "" = random
    init: str = path_setting(decides="nothing")
    image: ImageTowerConfig = field(default_factory=ImageTowerConfig)
    text: TextTowerConfig = field(default_factory=TextTowerConfig)
    patch_size: int = setting(8, at_least=1)  # pixels
    # timm: patches with a bias and no LayerNorm before the blocks (ViT, DeiT); null = the initial weights', else clip
    image_kind: Literal["clip", "timm"] | None = setting(None, from_weights=True)
    embedding_dim: int = setting(128, at_least=1)  # numbers per image or caption
    final_layer_norm: bool = True  # False: the last LayerNorm of both towers becomes the identity
    patch_dropout: float = setting(0.0, at_least=0.0, below=1.0)  # share of patches a training image loses
    gradient_checkpointing: bool = False  # saves activation memory, costs about a third more time

    def __post_init__(self) -> None:
        for name, tower in (("image", self.image), ("text", self.text)):
            if tower.width % tower.heads:
                raise ValueError(
                    f"model.{name}.heads = {tower.heads} does not divide model.{name}.width = {tower.width}; expected "
                    f"one of: {', '.join(str(n) for n in range(1, tower.width + 1) if tower.width % n == 0)}"
                )
            if round(tower.width * tower.mlp_ratio) < 1:
                raise ValueError(
                    f"model.{name}.mlp_ratio = {tower.mlp_ratio} of model.{name}.width = {tower.width} is no neuron; "
                    f"expected: at least {1 / tower.width:.2g}"
                )
            if tower.lock is not None and not (tower.init or self.init):
                raise ValueError(
                    f"model.{name}.lock = {tower.lock} without model.init and model.{name}.init would freeze random "
                    "weights; expected: null, or weights to start from"
                )
            if not tower.layers and not (tower.stem.name if name == "image" else tower.stem.weights):
                raise ValueError(
                    f"model.{name}.layers = 0 without a stem; expected: at least 1, or model.{name}.stem"
                    + (" as at scale photos" if name == "image" else "")
                )
            if name == "image" and tower.layers and not tower.projection:
                raise ValueError(
                    f"model.image.projection = false with model.image.layers = {tower.layers}; expected: "
                    "model.image.layers=0, or true"
                )
            if isinstance(tower.lock, int) and tower.lock > tower.layers:
                raise ValueError(
                    f"model.{name}.lock = {tower.lock} is more than model.{name}.layers = {tower.layers}; expected: "
                    f"all, or 0 to {tower.layers}"
                )
        if self.text.dropout and not self.text.layers:
            raise ValueError(
                f"model.text.dropout = {self.text.dropout} with model.text.layers = 0, a tower without layers; "
                "expected: 0, or at least one layer"
            )
        # a locked tower freezes its stem
        stem = self.image.stem
        if stem.name and stem.trainable and self.image.lock is not None:
            raise ValueError(
                f"model.image.lock = {self.image.lock} freezes the stem, but model.image.stem.trainable = true trains "
                "it; expected: lock=null, or trainable=false"
            )


def located(config: Any) -> Any:
    """A config whose weights and vocabulary are paths, where model.weights is a folder that holds them by name.

    The name is the part of a hub's name behind the slash, or timm's. A path may stand instead.
    """
    model = getattr(config, "model", None)
    if not isinstance(model, ModelConfig) or not model.weights:
        return config
    folder = Path(model.weights).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"model.weights = {model.weights}: no such folder; expected: one that holds weights by name")

    def at(key: str, name: str) -> str:
        path = folder / name.rpartition("/")[2]
        if name and path.exists():
            return str(path)
        if name and not Path(name).expanduser().exists():
            raise ConfigError(
                f"{key} = {name} is not in model.weights = {folder} (make: WEIGHTS), which holds "
                f"{some(sorted(item.name for item in folder.iterdir()), 10) or 'nothing'}; expected: {path}, another "
                "path, or no model.weights, for the hub's"
            )
        return name

    # every place of a config that may name weights or a vocabulary
    image, text = model.image, model.text
    start = getattr(config, "start", None)
    if start is not None:
        config = replace(config, start=replace(start, bert=at("start.bert", start.bert)))
    stem, vocabulary = image.stem, at("data.vocabulary", config.data.vocabulary)
    if not (stem.weights or image.init or model.init):  # else the stem comes with these
        stem = replace(stem, weights=at("model.image.stem.weights", stem.name))
    text_stem = replace(text.stem, weights=at("model.text.stem.weights", text.stem.weights))
    model = replace(
        model,
        init=at("model.init", model.init),
        image=replace(image, init=at("model.image.init", image.init), stem=stem),
        text=replace(text, init=at("model.text.init", text.init), stem=text_stem),
    )
    return replace(config, model=model, data=replace(config.data, vocabulary=vocabulary))


def check_patches(data: DataConfig, model: ModelConfig) -> None:
    """Checks across sections, for the __post_init__ of a config that holds both.

    Raises:
        ValueError: images are not cut into whole patches, patch dropout leaves none or all, a cache has no such view,
            or views without a cache.
    """
    if data.image_size % model.patch_size:
        raise ValueError(
            f"data.image_size = {data.image_size} is not a multiple of model.patch_size = {model.patch_size}; "
            f"expected: {multiples_beside(data.image_size, model.patch_size)}"
        )
    stem = model.image.stem
    crops = isinstance(stem.views, int)
    if model.image.has_cache and crops != (data.crop_scale is not None):
        raise ValueError(
            f"model.image.stem.views = {stem.views} with data.crop_scale = {data.crop_scale}; expected: "
            "a crop_scale with a number of crops, no crop_scale with centre or mirror, or "
            "model.image.stem.cache_gb=0 with views=centre"
        )
    if stem.name and not model.image.has_cache and stem.views != "centre":
        raise ValueError(
            f"model.image.stem.views = {stem.views} without cached features, whose views these are; expected: centre "
            "(data.crop_scale and data.augmentation vary the images of each step), or a frozen stem with "
            "model.image.stem.cache_gb above 0"
        )
    if model.image.has_cache and data.augmentation != "none":
        raise ValueError(
            f"data.augmentation = {data.augmentation} with cached features of a stem; expected: none, or "
            "model.image.stem.cache_gb=0"
        )
    patches, share = (data.image_size // model.patch_size) ** 2, model.patch_dropout
    kept = round(patches * (1 - share))
    if kept < 1 or (share and kept == patches):
        raise ValueError(
            f"model.patch_dropout = {share} leaves {kept or 'none'} of the {patches} patches of an image; expected: 0"
            + (f", or {1 / patches:.3g} to {1 - 1 / patches:.3g}" if patches > 1 else "")
        )


@dataclass(frozen=True)
class OptimConfig:
    """AdamW with linear warm-up and cosine decay to final_learning_rate."""

    steps: int = setting(250, at_least=1)  # optimiser updates
    global_batch_size: int = setting(256, at_least=2)  # pairs per update over all processes; all are negatives
    # pairs per pass and process, same loss; null = the share
    micro_batch_size: int | None = setting(None, at_least=1, decides="nothing")
    # the same loss in tiles of so many rows and columns; 0 = B x B at once
    loss_tile: int = setting(0, at_least=0, decides="nothing")
    loss_bf16_product: bool = False  # with loss_tile, on CUDA: tiles of an inner product by factors in bfloat16
    # with loss_tile, on CUDA: Triton kernels between a tile's products, for the cases they have; triton refuses others
    loss_kernel: Literal["torch", "auto", "triton"] = setting("torch", decides="nothing")
    learning_rate: float = setting(1.0e-3, above=0.0)  # peak
    final_learning_rate: float = setting(0.0, at_least=0.0)
    warmup_steps: int = setting(25, at_least=0)
    warmup_from: float = setting(0.0, at_least=0.0)  # rate that the warm-up starts from
    weight_decay: float = setting(0.2, at_least=0.0)  # matrices only: no class tokens, norms, biases, scalars
    beta1: float = setting(0.9, at_least=0.0, below=1.0)
    beta2: float = setting(0.98, at_least=0.0, below=1.0)
    epsilon: float = setting(1.0e-8, above=0.0)
    max_gradient_norm: float | None = setting(1.0, above=0.0)  # null = no clipping
    logit_scale_rate: float = setting(1.0, above=0.0)  # of logit scale, bias and curvature, over the weights' rate
    # decay of an exponential moving average of the weights, which is evaluated and published; null = none
    ema: float | None = setting(None, above=0.0, below=1.0, decides="weights")
    compile: bool = setting(False, decides="nothing")  # torch.compile of the towers; needs a C++ compiler

    def __post_init__(self) -> None:
        if self.warmup_steps > self.steps:
            raise ValueError(
                f"optim.warmup_steps = {self.warmup_steps} is more than optim.steps = {self.steps}: the warm-up "
                f"would not end; expected: at most {self.steps}"
            )
        _check_rates(self)
        if self.warmup_from and not self.warmup_steps:
            raise ValueError(
                f"optim.warmup_from = {self.warmup_from} with optim.warmup_steps = 0; expected: 0, or steps of warm-up"
            )
        if self.loss_bf16_product and not self.loss_tile:
            raise ValueError("optim.loss_bf16_product = true with optim.loss_tile = 0; expected: tiles, as in 4096")
        if self.loss_kernel == "triton" and not self.loss_tile:
            raise ValueError("optim.loss_kernel = triton with optim.loss_tile = 0; expected: tiles, as in 4096")

    @property
    def tiles(self) -> dict[str, Any]:
        """Arguments of a loss in tiles; empty without tiles."""
        if not self.loss_tile:
            return {}
        return {"tile": self.loss_tile, "bf16_product": self.loss_bf16_product, "kernel": self.loss_kernel}


def _check_rates(optim: Any) -> None:
    for key in ("warmup_from", "final_learning_rate"):
        if (rate := getattr(optim, key)) > optim.learning_rate:
            raise ValueError(
                f"optim.{key} = {rate} with optim.learning_rate = {optim.learning_rate}; expected: at most the peak"
            )


@dataclass(frozen=True)
class SgdConfig:
    """SGD with linear warm-up and cosine decay, both per step, for learning from images without text."""

    steps: int = setting(1_000, at_least=1)  # optimiser updates; random_weights makes none
    global_batch_size: int = setting(256, at_least=2)  # images per update over all processes, two views of each
    learning_rate: float = setting(0.06, above=0.0)  # for 256 images; the peak is this times global_batch_size / 256
    final_learning_rate: float = setting(0.0, at_least=0.0)  # for 256 images
    warmup_share: float = setting(0.0, at_least=0.0, at_most=1.0)  # of the steps
    sgd_momentum: float = setting(0.9, at_least=0.0, below=1.0)
    weight_decay: float = setting(5.0e-4, at_least=0.0)
    decay_vectors: bool = True  # norms and biases decay too; SimCLR: no
    constant_predictor_rate: bool = False  # SimSiam: the predictor keeps the peak rate throughout
    max_gradient_norm: float | None = setting(None, above=0.0)  # null = no clipping
    compile: bool = setting(False, decides="nothing")  # torch.compile of the backbones; needs a C++ compiler
    warmup_from = 0.0  # not a setting

    def __post_init__(self) -> None:
        _check_rates(self)

    @property
    def warmup_steps(self) -> int:
        return round(self.warmup_share * self.steps)


@dataclass(frozen=True)
class RunConfig:
    """Seed, hardware and intervals of writing. All but seed and precision may change when a run is resumed."""

    decides: ClassVar[Decides] = "nothing"
    seed: int = setting(0, at_least=0, decides="weights")
    # loader processes per training process; null = by the cores, none for scenes, cached features and small sets
    num_workers: int | None = setting(None, at_least=0)
    data_timeout: float = setting(600.0, above=0.0)  # seconds that a step may wait for its loader processes
    process_timeout: float = setting(1_800.0, above=0.0)  # seconds that a process waits for another one
    lock: bool = True  # one process at a time trains in a run's folder; false where the disk knows no locks
    # towers in bfloat16; auto: where the machine computes it natively; null = as `accelerate launch` says
    mixed_precision: Literal["no", "bf16", "auto"] | None = None
    deterministic: bool = False  # only algorithms that give the same on the same machine every time; slower on a GPU
    log_every: int = setting(10, at_least=1)  # steps
    diagnose_every: int = setting(10, at_least=0)  # steps between log lines that look at the embeddings, 0 = never
    evaluate_every: int = setting(0, at_least=0)  # steps between R@1 on the val set, zero-shot accuracy; 0 = never
    test: bool = True  # evaluate the test sets at the end; false: only the validation set, for a search of settings
    save_every: int = setting(0, at_least=0)  # steps between checkpoints, 0 = only at the end and at a stop signal
    keep_checkpoints: int = setting(2, at_least=1)  # newest ones; with 1 there is none to go back to if it is damaged
    evaluation_batch_size: int = setting(256, at_least=1)  # per process
    # of the scores that a process holds when a test set is ranked; those of a larger set are computed part by part,
    # twice, with the same ranks; at least those of 256 images and all captions are held
    ranking_gb: float = setting(2.0, above=0.0)
    tracker: Literal["none", "tensorboard", "wandb", "trackio"] = "none"  # beside the JSON lines, through Accelerate
