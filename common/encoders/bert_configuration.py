"""What a BERT's files say beside its tensors: a key is honoured, changes no token, or is refused by name and value."""

from pathlib import Path
from typing import Any

from common.data.text_files import read_json, read_json_object

HONOURED = {
    *("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    *("hidden_act", "max_position_embeddings", "type_vocab_size", "layer_norm_eps"),
}
CHANGES_NOTHING = {
    # acts in training, in a head or the pooler, or in what a call returns
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout", "initializer_range", "use_cache"),
    *("id2label", "label2id", "num_labels", "problem_type", "return_dict", "output_attentions", "output_hidden_states"),
    *("gradient_checkpointing", "chunk_size_feed_forward", "directionality", "pooler_fc_size", "pooler_type"),
    *("pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head"),
    # ids come from the tokenizer
    *("pad_token_id", "bos_token_id", "eos_token_id"),
    # where it comes from, and in which numbers it was saved
    *("_name_or_path", "architectures", "transformers_version", "torch_dtype", "dtype", "finetuning_task"),
}
EXPECTED = {  # other values give other tokens
    "is_decoder": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "position_embedding_type": "absolute",
    "tie_word_embeddings": True,
}
_POOLING = "pooling_mode_"
_MODULES = ("Transformer", "Pooling", "Normalize")  # of sentence-transformers; a geometry normalises by itself


def check_bert(file: Path) -> None:
    """Refuses a config.json with which transformers, or the author's code, makes other tokens than our tower.

    Raises:
        ValueError: names file, key and value.
    """
    for key, value in sorted(read_json_object(file).items()):
        if key in EXPECTED and value != EXPECTED[key]:
            raise ValueError(f"{file}: {key} = {value!r}; expected: {EXPECTED[key]!r}")
        if key not in HONOURED | CHANGES_NOTHING | EXPECTED.keys():
            raise ValueError(f"{file}: {key} = {value!r} is not known; expected the keys of transformers' BertConfig")


def check_pooling(folder: Path) -> None:
    """Refuses a sentence encoder whose sentence is not the mean over its tokens; one without modules.json is taken.

    Raises:
        ValueError: names file, key and value.
    """
    if not (folder / "modules.json").is_file():
        return
    instead = "; a text tower with model.text.layers above 0 reads the tokens and takes any of them"
    for module in read_json(folder / "modules.json"):
        kind = module["type"].rpartition(".")[2]
        if kind not in _MODULES:
            raise ValueError(
                f"{folder / 'modules.json'}: type = {module['type']}; expected: {', '.join(_MODULES)}{instead}"
            )
        if kind == "Pooling":
            file = folder / module["path"] / "config.json"
            _check_mean(file, read_json_object(file), instead)


def _check_mean(file: Path, content: dict[str, Any], instead: str) -> None:
    modes = {key: value for key, value in content.items() if key.startswith(_POOLING) and value}
    modes |= {"pooling_mode": content["pooling_mode"]} if "pooling_mode" in content else {}
    for key, value in modes.items():
        if (key, value) not in ((f"{_POOLING}mean_tokens", True), ("pooling_mode", "mean")):
            raise ValueError(f"{file}: {key} = {value!r}; expected: {_POOLING}mean_tokens only{instead}")
