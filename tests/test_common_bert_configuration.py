"""What lies beside a BERT's tensors: transformers' config.json, sentence-transformers' pooling, the tokenizer's own."""

import json
from functools import partial

import pytest
import torch
import transformers
from refusals import refused

from common.data.bert_tokenizer import SPECIAL_TOKENS, BertTokenizer
from common.encoders.sentence_encoder import check_pooling
from common.encoders.weights import read_bert, read_source

SMALL = {"vocab_size": 18, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 40,
         "max_position_embeddings": 20}  # fmt: skip
IDS = torch.tensor([[2, 5, 6, 7, 3]])


@pytest.fixture
def bert(tmp_path):
    torch.manual_seed(0)
    transformers.BertModel(transformers.BertConfig(**SMALL)).save_pretrained(tmp_path)
    return tmp_path


def change(file, **values):
    file.write_text(json.dumps((json.loads(file.read_text()) if file.is_file() else {}) | values))


@pytest.mark.parametrize("keys", [
    {"pad_token_id": 7, "eos_token_id": 5, "hidden_dropout_prob": 0.9, "initializer_range": 9.0, "use_cache": False,
     "chunk_size_feed_forward": 1},  # change no token
    {"layer_norm_eps": 0.1, "hidden_act": "quick_gelu"},
])  # fmt: skip
def test_tokens_are_those_of_transformers_with_the_keys(bert, keys):
    change(bert / "config.json", **keys)
    with torch.no_grad():
        wanted = transformers.BertModel.from_pretrained(bert).eval()(IDS, attention_mask=torch.ones_like(IDS))
        tower = read_source(str(bert)).text_tower
        torch.testing.assert_close(tower.forward_tokens(IDS), wanted.last_hidden_state, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("key", "value", "message"), [
    ("add_cross_attention", True, "add_cross_attention = true; expected one of: false"),
    ("position_embedding_type", "relative_key", 'position_embedding_type = "relative_key"; expected'),
    ("rotary", 3, "rotary = 3; expected no such key"),
])  # fmt: skip
def test_a_key_that_changes_the_tokens_is_refused(bert, key, value, message):
    change(bert / "config.json", **{key: value})
    refused(*((f"config.json: {message}", partial(read, str(bert))) for read in (read_source, read_bert)))


def sentence_encoder(folder, pooling, *more):
    kinds = ["Transformer", "Pooling", *more]
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": f"{n}_{kind}"} for n, kind in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 24, **pooling}))


def test_a_mean_over_words_stands_only_for_sentence_encoders_that_take_it(tmp_path):
    check_pooling(str(tmp_path))
    mean, cls = "pooling_mode_mean_tokens", "pooling_mode_cls_token"
    sentence_encoder(tmp_path, {mean: True, cls: False}, "Normalize")
    check_pooling(str(tmp_path))
    for pooling, more, message in (
        ({mean: False, cls: True}, (), "1_Pooling/config.json: pooling_mode_cls_token = True; expected: pooling_mode"),
        ({"pooling_mode": "cls"}, (), "pooling_mode = 'cls'"),
        ({mean: True}, ("Dense",), "modules.json: type = sentence_transformers.models.Dense; expected: Transformer"),
    ):
        sentence_encoder(tmp_path, pooling, *more)
        refused((message, partial(check_pooling, str(tmp_path))))


def test_what_a_model_on_the_hub_states_is_asked_for(tmp_path, monkeypatch):
    def downloaded(name, file_names, key):
        file = next((tmp_path / one for one in file_names if (tmp_path / one).is_file()), None)
        if file is None:
            raise ValueError("the model has none of them")
        cached = tmp_path / "cache" / file.name  # where only what was asked for lies
        cached.parent.mkdir(exist_ok=True)
        return file.rename(cached) if file.name == "vocab.txt" else file

    monkeypatch.setattr("common.data.text_files._hub_file", downloaded)
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, "a", "dog"]))
    change(tmp_path / "tokenizer_config.json", strip_accents=False)
    refused(("strip_accents = False; expected: True", partial(BertTokenizer.from_vocabulary, "me/mine")))
    sentence_encoder(tmp_path, {"pooling_mode_cls_token": True})
    refused(("pooling_mode_cls_token = True", partial(check_pooling, "me/mine")))
    (tmp_path / "1_Pooling" / "config.json").unlink()
    refused((r"me/mine has no 1_Pooling/config\.json", partial(check_pooling, "me/mine")))


@pytest.mark.parametrize(("key", "value"), [("do_lower_case", False), ("never_split", ["a"])])
def test_a_vocabulary_whose_texts_are_cleaned_in_another_way_is_refused(tmp_path, key, value):
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, "a", "dog"]))
    change(tmp_path / "tokenizer_config.json", do_lower_case=True, strip_accents=None, model_max_length=512)
    tokenizer = BertTokenizer.from_vocabulary(str(tmp_path))
    theirs = transformers.BertTokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode(["A dóg"], 4)[0].tolist() == theirs("A dóg")["input_ids"]
    change(tmp_path / "tokenizer_config.json", **{key: value})
    refused((rf"vocab.txt: tokenizer_config.json: {key} = ", partial(BertTokenizer.from_vocabulary, str(tmp_path))))


def test_the_normaliser_of_a_tokenizer_json_is_heeded(tmp_path):
    vocabulary = {token: number for number, token in enumerate([*SPECIAL_TOKENS, "a"])}
    normalizer = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None}
    content = {"model": {"vocab": vocabulary}, "normalizer": {**normalizer, "lowercase": True}}
    change(tmp_path / "tokenizer.json", **content)
    assert BertTokenizer.from_vocabulary(str(tmp_path)).vocabulary_size == 6
    for other, stated in (({**normalizer, "lowercase": False}, "lowercase = False"), (None, "type = None")):
        change(tmp_path / "tokenizer.json", normalizer=other)
        message = rf"tokenizer.json: {stated}; expected: (True|'BertNormalizer')"
        refused((message, partial(BertTokenizer.from_vocabulary, str(tmp_path))))
