"""GeoMM's tasks: models and losses beside loops written from the formula, and fine-tuning at smoke scale."""

import json
import warnings
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
import transformers
from accelerate import Accelerator
from killed_run import records, resumed_after
from PIL import Image
from processes import in_processes
from refusals import refused
from runs import lines
from scipy.stats import chisquare
from torch.nn.parallel import DistributedDataParallel

from common.base.config import ConfigError
from common.base.files import read_repository_yaml
from common.base.provenance import ROOT
from common.data.scenes import annotation_task, scene_words
from common.data.tokenizer import WordTokenizer
from common.data.transforms import ImageTransform
from common.encoders.fusion import FusionTransformer, MaskedLanguageHead
from common.encoders.text import BidirectionalTextTransformer
from common.encoders.vision import VisionTransformer
from common.evaluation.annotated import vqa_score
from common.evaluation.embed import Encoder
from common.reproduce.rows import Job, run_row
from common.run.checkpoint import CheckpointError, last_checkpoint
from common.run.folder import RunFiles
from geomm import evaluate as of_pairs
from geomm.downstream import models
from geomm.downstream.build import _doubled, start_
from geomm.downstream.data import (
    Altered,
    TaskView,
    encoded_answers,
    open_task_training,
    open_test_sets,
    open_training_set,
)
from geomm.downstream.models import (
    AnswerDecoder,
    Answering,
    Classification,
    FusedReader,
    TextAssignment,
    classifier,
    drawn_pictures,
    ranked,
)
from geomm.evaluate_tasks import MODELS, evaluate_task, predictions, vqa_evaluation
from geomm.finetune import CODE, finetune
from geomm.model import build_encoders

WIDTH, WORDS, LENGTH = 16, 30, 9
FEW = ("optim.steps=2", "optim.warmup_steps=0", "optim.learning_rate=0.01", "data.num_train=64", "data.num_val=8",
       "data.num_test=12", "run.evaluate_every=0", "run.save_every=0", "method.queue_size=16")  # fmt: skip


def albef(layers=2, dropout=0.0):
    """Towers and fusion of random weights, small enough for loops."""
    torch.manual_seed(3)
    image_tower = VisionTransformer(8, 4, WIDTH, 1, 2, projection_dim=None)
    text_tower = BidirectionalTextTransformer(
        WORDS, 12, WIDTH, 1, 2, projection_dim=None, final_layer_norm=False, norm_eps=1e-12, end_id=3, dropout=dropout
    )
    fusion = FusionTransformer(WIDTH, WIDTH, layers, 2, dropout=dropout)
    for block in fusion.transformer.blocks:  # far from the start, so that what is looked at counts
        torch.nn.init.normal_(block.cross_attention.memory_projection.weight, std=1.0)
        torch.nn.init.normal_(block.cross_attention.out_projection.weight, std=1.0)
    torch.nn.init.normal_(text_tower.token_embedding.weight, std=0.5)
    return image_tower, text_tower, fusion, MaskedLanguageHead(WIDTH, WORDS)


def model_of(task, dropout=0.0):
    image_tower, text_tower, fusion, word_head = albef(dropout=dropout)
    if task == "vqa":
        return Answering(FusedReader(image_tower, text_tower, fusion, AnswerDecoder(text_tower, fusion, word_head)))
    if task == "visual_entailment":
        return Classification(FusedReader(image_tower, text_tower, fusion, classifier(WIDTH, 3)))
    if task == "nlvr2":
        return Classification(FusedReader(image_tower, text_tower, fusion.doubled(), classifier(WIDTH, 2)))
    return TextAssignment(FusedReader(image_tower, text_tower, fusion.doubled(), torch.nn.Linear(WIDTH, 3)), WIDTH)


def texts(count, longest=LENGTH, seed=0):
    """Ids of unlike lengths: start, words, end, padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, WORDS, (count, longest), generator=generator)
    for row, length in enumerate(torch.randint(3, longest + 1, (count,), generator=generator)):
        ids[row, 0], ids[row, length - 1], ids[row, length:] = 2, 3, 0
    return ids[:, : int((ids == 3).int().argmax(dim=1).max()) + 1]


def pixels(*shape):
    return torch.randn(*shape, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def inputs_of(task, batch=6):
    """What the model of a task is trained on, but for alpha."""
    images, ids = pixels(batch, 2 if task == "nlvr2" else 1), texts(batch)
    if task == "vqa":  # the third question has three answers, the others one or two
        rows = torch.tensor([0, 0, 1, 2, 2, 2, 3, 4, 4, 5])[: 5 * batch // 3]
        shares = torch.tensor([0.7, 0.3, 1, 0.5, 0.25, 0.25, 1, 0.9, 0.1, 1])[: len(rows)]
        return images, ids, texts(len(rows), 6, seed=4), shares, rows
    classes = {"visual_entailment": 3, "nlvr2": 2}.get(task)
    return (images, ids, torch.arange(batch) % classes) if classes else (images, ids)


def moved(model):
    """The model with other weights than its momentum copy."""
    with torch.no_grad():
        for parameter in model.encoders.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


# -------------------------------------------------------------------------------- the decoder, and VQA


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_the_decoder_is_berts_and_so_are_its_draws_in_training(dropout):
    decoder = model_of("vqa", dropout).encoders.head
    theirs = transformers.BertLMHeadModel(
        transformers.BertConfig(
            vocab_size=WORDS, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=4 * WIDTH, max_position_embeddings=12, is_decoder=True, add_cross_attention=True,
            hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
        )
    )  # fmt: skip
    embeddings, head = theirs.bert.embeddings, theirs.cls.predictions
    with torch.no_grad():
        embeddings.token_type_embeddings.weight.zero_()
        embeddings.word_embeddings.weight.copy_(decoder.token_embedding.weight)
        embeddings.position_embeddings.weight.copy_(decoder.position_embedding)
        copied = [(embeddings.LayerNorm, decoder.input_norm), (head.transform.dense, decoder.word_head.dense)]
        copied.append((head.transform.LayerNorm, decoder.word_head.norm))
        head.decoder.weight.copy_(decoder.token_embedding.weight)
        head.decoder.bias.copy_(decoder.word_head.bias)
        for layer, block in zip(theirs.bert.encoder.layer, decoder.transformer.blocks):
            for attention, linear in (
                (layer.attention.self, block.attention.in_projection),
                (layer.crossattention.self, block.cross_attention.memory_projection),
            ):
                parts = (attention.query, attention.key, attention.value)[3 - len(linear.bias) // WIDTH :]
                for part, weight, bias in zip(parts, linear.weight.split(WIDTH), linear.bias.split(WIDTH)):
                    part.weight.copy_(weight)
                    part.bias.copy_(bias)
            copied += [
                (layer.crossattention.self.query, block.cross_attention.query_projection),
                (layer.attention.output.dense, block.attention.out_projection),
                (layer.crossattention.output.dense, block.cross_attention.out_projection),
                (layer.attention.output.LayerNorm, block.attention_norm),
                (layer.crossattention.output.LayerNorm, block.cross_attention_norm),
                (layer.intermediate.dense, block.mlp[0]), (layer.output.dense, block.mlp[2]),
                (layer.output.LayerNorm, block.mlp_norm),
            ]  # fmt: skip
        for target, source in copied:
            target.load_state_dict(source.state_dict())
        question, mask, ids = torch.randn(4, 5, WIDTH), torch.rand(4, 5) < 0.7, texts(4, 6)
        mask[:, 0] = True
        for training in (False, True):
            torch.manual_seed(1)
            expected = theirs.train(training)(ids, encoder_hidden_states=question, encoder_attention_mask=mask.long())
            torch.manual_seed(1)
            actual = decoder.train(training)(ids, question, mask)
            torch.testing.assert_close(actual, expected.logits, rtol=1e-4, atol=1e-5)
        assert torch.equal(actual, decoder.eval()(ids, question, mask)) == (not dropout)


@pytest.mark.parametrize("alpha", [0.0, 0.4])
def test_the_loss_of_answers_is_that_of_the_loop(alpha):
    """Per question sum over answers of share x sum over tokens of (1 - alpha) nll + alpha x soft cross-entropy."""
    model = moved(model_of("vqa"))
    images, ids, answers, shares, rows = inputs_of("vqa")
    total = 0.0
    with torch.no_grad():
        for answer, share, row in zip(answers, shares, rows):
            length = int((answer == 3).int().argmax()) + 1
            scores = []
            for encoders in (model.encoders, model.momentum_encoders.encoder):
                question, mask = encoders.fused(encoders.image_tokens(images[row : row + 1]), ids[row : row + 1])
                logits = encoders.head(answer[None, : length - 1], question, mask)[0]
                scores.append(logits.log_softmax(dim=1))  # over the vocabulary
            online, momentum = scores
            for place in range(length - 1):
                hard = -online[place, answer[place + 1]]
                soft = -(momentum[place].exp() * online[place]).sum()
                total += share * ((1 - alpha) * hard + alpha * soft)
        loss = model(images, ids, answers, shares, rows, alpha).loss
    torch.testing.assert_close(loss, total / len(images), rtol=1e-4, atol=1e-5)


def test_weights_of_answers_are_shares_of_the_annotators():
    tokenizer = WordTokenizer.from_words(["red", "blue", "what", "is", "it"])
    answers_of = [["red"] * 6 + ["blue"] * 4, ["blue"] * 10, ["it is red"] + ["red"] * 9]
    items = [{"question": "what is it", "answers": answers} for answers in answers_of]
    ids, weights, rows = TaskView(SimpleNamespace(tokenizer=tokenizer), "vqa")._targets(items)
    assert weights.tolist() == pytest.approx([0.6, 0.4, 1, 0.1, 0.9])
    assert [tokenizer.decode(answer)[1] for answer in ids] == ["red", "blue", "blue", "it", "red"]
    assert rows.tolist() == [0, 0, 1, 2, 2]


def by_loops(decoder, question, mask, listed, k, times_first=2):
    """The released ranking for each question alone, each answer alone."""
    best = []
    for row in range(len(question)):
        memory, seen = question[row : row + 1], mask[row : row + 1]
        first = decoder(listed[:1, :1], memory, seen)[0, 0].log_softmax(dim=0)
        order = sorted(range(len(listed)), key=lambda place: (-first[listed[place, 1]].item(), place))
        scores = {}
        for place in sorted(order[:k]):
            answer = listed[place, : int((listed[place] == 3).int().argmax()) + 1]
            tokens = decoder(answer[None, :-1], memory, seen)[0].log_softmax(dim=1)
            whole = sum(tokens[at, token] for at, token in enumerate(answer[1:]))
            scores[place] = (whole + (times_first - 1) * first[answer[1]]).item()
        best.append(max(scores, key=scores.get))
    return best


@torch.no_grad()
@pytest.mark.parametrize("k", [1, 5])
def test_answers_are_ranked_as_in_loops_in_batches_of_any_size(k, monkeypatch):
    decoder = moved(model_of("vqa")).encoders.head
    listed = texts(12, 6, seed=5)
    listed[7], listed[9, 1] = listed[2], listed[3, 1]  # one answer twice, two with the same first word
    question, mask = 3 * torch.randn(16, 5, WIDTH), torch.rand(16, 5) < 0.8
    mask[:, 0] = True
    best = ranked(decoder, question, mask, listed, k)
    assert best.tolist() == by_loops(decoder, question, mask, listed, k)
    monkeypatch.setattr("geomm.downstream.models.SEQUENCES_AT_ONCE", 7)
    parts = [ranked(decoder, *part, listed, k) for part in zip(question.split(5), mask.split(5))]
    assert torch.cat(parts).equal(best)
    if k > 1:  # the first word counts twice, and it matters
        assert by_loops(decoder, question, mask, listed, k, times_first=1) != best.tolist()
        assert len(set(best.tolist())) > 1


# -------------------------------------------------------------------------------- two pictures


@torch.no_grad()
def test_the_doubled_fusion_looks_at_the_two_pictures_in_turn():
    reader = moved(model_of("nlvr2")).encoders
    left, right = torch.randn(2, 4, 5, WIDTH)
    ids = texts(4)
    mask = reader.text_tower.word_mask(ids)
    tokens = reader.text_tower.forward_tokens(ids, mask)
    blocks = reader.fusion.transformer.blocks
    assert len(blocks) == 4
    for number, block in enumerate(blocks):
        tokens = block(tokens, mask[:, None, None, :], memory=(left, right)[number % 2])
    fused, _ = reader.fused((left, right), ids)
    torch.testing.assert_close(fused[mask], tokens[mask])
    for other in ((left, left), (right, left)):
        assert not torch.allclose(reader.fused(other, ids)[0][mask], tokens[mask])


def test_a_doubled_fusion_of_one_picture_begins_as_the_layers_it_was_made_of():
    *_, fusion, _ = albef()
    doubled = fusion.doubled()
    for number, block in enumerate(doubled.transformer.blocks):
        original = fusion.transformer.blocks[number // 2].state_dict()
        torch.testing.assert_close(block.state_dict(), original, rtol=0, atol=0)
    assert not {*map(id, fusion.parameters())} & {*map(id, doubled.parameters())}
    stored, names = (module.state_dict(prefix="encoders.fusion.") for module in (fusion, doubled))
    torch.testing.assert_close(_doubled(stored, 4, "a run"), dict(names), rtol=0, atol=0)


def test_keys_and_values_stay_shared_after_a_step_and_nothing_else_does():
    model = model_of("nlvr2")
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.01)
    model(*inputs_of("nlvr2"), 0.4).loss.backward()
    optimizer.step()
    model.update_momentum_encoders(0.5)
    for encoders in (model.encoders, model.momentum_encoders.encoder):
        blocks = encoders.fusion.transformer.blocks
        for first, second in zip(blocks[::2], blocks[1::2]):
            for name, tensor in first.state_dict().items():
                shared = name.startswith("cross_attention.memory_projection")
                assert torch.equal(tensor, second.state_dict()[name]) == shared or name.endswith("norm.bias"), name


def test_the_picture_beside_a_captions_is_drawn_from_the_softmax_on_either_side():
    """Pearson's chi-square of the counts, 2 degrees of freedom; two draws without replacement for neither."""
    torch.manual_seed(0)
    logits = torch.tensor([1.0, 0.0, -1.0])  # of pictures 1 to 3 for the caption of picture 0
    logits = torch.cat([torch.tensor([5.0]), logits]).expand(4, 4)
    share = logits[0, 1:].double().softmax(dim=0)  # .67, .24, .09
    counts, unlike = torch.zeros(3, 4, 4), ~torch.eye(3, dtype=torch.bool)
    for _ in range(6_000):
        first, second, label = (int(side[0]) for side in drawn_pictures(logits))
        counts[label, first, second] += 1
    drawn = counts[0, 0, 1:], counts[1, 1:, 0], counts[2, 1:, 1:][unlike]
    pairs = share[:, None] * share / (1 - share[:, None])
    for of_label, observed, expected in zip(counts, drawn, (share, share, pairs[unlike])):
        total = float(observed.sum())
        assert total == of_label.sum().item() == pytest.approx(2_000, abs=150)  # four standard deviations
        assert chisquare(observed, expected * total).pvalue > 0.001
    with pytest.raises(ValueError, match=r"2 captions in a process; accepted for text assignment: at least 3, so"):
        drawn_pictures(logits[:2, :2])


def test_text_assignment_is_cross_entropy_on_the_drawn_pictures_and_the_projection_stays():
    model = model_of("text_assignment").eval()
    images, ids = inputs_of("text_assignment")
    drawn = (torch.tensor([0, 2, 2, 1, 4, 0]), torch.tensor([3, 1, 5, 3, 2, 2]), torch.tensor([0, 1, 0, 1, 0, 2]))
    logits = [
        model.encoders(torch.cat([images[first], images[second]])[None], ids[row, None])
        for row, (first, second, _) in enumerate(zip(*drawn))
    ]
    torch.testing.assert_close(model(images, ids, 0.0, drawn).loss, F.cross_entropy(torch.cat(logits), drawn[2]))
    with torch.autocast("cpu", torch.bfloat16), patch.object(models, "drawn_pictures", return_value=drawn) as draws:
        model(images, ids, 0.0)
    assert draws.call_args[0][0].dtype == torch.float32
    model(images, ids, 0.0).loss.backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == name.startswith("encoders.image_projection"), name


@pytest.mark.parametrize("task", ["visual_entailment", "nlvr2"])
def test_classes_are_distilled_from_the_momentum_copy(task):
    model = moved(model_of(task))
    images, ids, labels = inputs_of(task)
    with torch.no_grad():
        online, soft = (
            encoders(images, ids).log_softmax(1) for encoders in (model.encoders, model.momentum_encoders.encoder)
        )
        rows = [-0.6 * one[label] - 0.4 * (two.exp() * one).sum() for one, two, label in zip(online, soft, labels)]
        result = model(images, ids, labels, 0.4)
    torch.testing.assert_close(result.loss, sum(rows) / len(rows))
    assert torch.equal(result.right, model.predict(images, ids) == labels)


# -------------------------------------------------------------------------------- several processes


def _gradients(task, rows, halved):
    """In float64: what two processes sum in another order is equal to more digits than float32 has."""
    model = moved(model_of(task)).double()
    images, ids, *targets = inputs_of(task)
    images = images.double()
    if task == "vqa":
        answers, shares, question_of = targets
        kept = (question_of >= rows.start) & (question_of < rows.stop)
        targets = [answers[kept], shares[kept], question_of[kept] - rows.start]
    elif task == "text_assignment":  # each process draws among its own pictures
        first, second, labels = torch.tensor([[0, 1, 1, 3, 3, 5], [1, 2, 0, 4, 5, 3], [0, 0, 2, 0, 2, 0]])[:, rows]
        targets = [0.4, [first - rows.start, second - rows.start, labels]]
    else:
        targets = [targets[0][rows]]
    targets += [] if task == "text_assignment" else [0.4]
    torch.manual_seed(0)
    wrapped = DistributedDataParallel(model, broadcast_buffers=False) if halved else model
    wrapped(images[rows], ids[rows], *targets).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}


class Lightness(torch.nn.Module):
    """Says of an item a whole number that no other has."""

    def predict(self, images, token_ids):
        return (1000 * images.flatten(1).sum(dim=1)).long() + token_ids.sum(dim=1)


def _predictions():
    """Of eight items in batches of three."""
    items = Altered(annotation_task("nlvr2", size=8, image_size=16))
    tokenizer = WordTokenizer.from_words(scene_words())
    encoder = Encoder(Lightness(), ImageTransform(16), tokenizer, 32, 3, torch.device("cpu"))
    return predictions(encoder, items, "nlvr2")


def _in_halves(tasks):
    half = torch.distributed.get_rank()
    return {task: _gradients(task, slice(3 * half, 3 * half + 3), halved=True) for task in tasks}, _predictions()


def test_two_processes_give_the_gradients_and_the_predictions_of_one():
    tasks = ("vqa", "text_assignment", "nlvr2")
    halves = in_processes(2, _in_halves, tasks)
    for task in tasks:
        for name, expected in _gradients(task, slice(0, 6), halved=False).items():
            for gradients, _ in halves:
                torch.testing.assert_close(gradients[task][name], expected, rtol=1e-7, atol=1e-9, msg=f"{task} {name}")
    answers = _predictions()
    assert len(set(answers)) == 8
    assert [predicted for _, predicted in halves] == [answers, answers]


# -------------------------------------------------------------------------------- runs


def config_of(row, *overrides, scale="smoke"):
    return CODE.config(f"{row}.yaml", scale, overrides)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Runs of the three tasks, which start from one ALBEF."""
    folder = tmp_path_factory.mktemp("runs")
    rows = ("vqa_albef", "visual_entailment_albef", "nlvr2_albef")
    return {row: run_row(Job(CODE, f"{row}.yaml", "smoke", 0, FEW, folder)) for row in rows}


def encoder_of(run):
    return MODELS.load_encoder(last_checkpoint(run.files.checkpoints), torch.device("cpu"))


def test_all_tasks_start_from_one_run_and_nlvr2_from_text_assignment(finished):
    of_vqa, of_entailment, of_pairs = (run.config.start.run for run in finished.values())
    assert of_vqa == of_entailment
    assert "/assigned_albef-" in of_pairs
    # what draws the training items makes a run stale when it changes
    files = json.loads((finished["vqa_albef"].files.folder / "dependencies.json").read_text())
    assert "common/data/scenes/tasks/questions.py" in files
    for run in finished.values():
        event = lines(run.files, "start")[0]
        assert event["new"] == (0 if "vqa" in str(run.files.folder) else 4)  # the head of classes
    assert finished["vqa_albef"].evaluations.keys() == {"vqa_dev", "vqa_test"}
    assert finished["nlvr2_albef"].evaluations.keys() == {"nlvr2_dev", "nlvr2_test", "nlvr2_exchanged"}


def test_every_task_of_a_row_starts_from_that_rows_pretraining():
    rows = [row for row in CODE.printed("table3")["rows"] if "config" in row]
    assert len(rows) == 6
    for row in rows:
        start, assigned = row["config"].removesuffix(".yaml"), f"assigned_{row['config']}"
        for task in ("vqa", "nlvr2", "visual_entailment", "text_assignment"):
            settings = read_repository_yaml(ROOT / "geomm" / "configs" / row.get(task, assigned))
            expected = assigned.removesuffix(".yaml") if task == "nlvr2" else start
            assert (settings["data"]["task"], settings["start"]["row"]) == (task, expected)
            assert settings["method"]["distance"] == ("geodesic" if start.endswith("_geo") else "cosine")


@pytest.mark.parametrize("row", ["vqa_albef", "nlvr2_albef"])
def test_what_a_task_starts_with_are_the_weights_of_its_run(row, finished):
    config, encoder = encoder_of(finished[row])
    weights = last_checkpoint(RunFiles(ROOT / config.start.run).checkpoints).model_tensors()
    torch.manual_seed(8)
    model = MODELS.build_model(config, encoder.tokenizer)
    start_(model, config)
    state = model.state_dict()
    for name, tensor in weights.items():
        if name.startswith(("encoders.image_tower", "encoders.text_tower", "encoders.fusion")):
            assert torch.equal(state[name], tensor), name
    if row == "vqa_albef":
        for ours, theirs in (("transformer", "fusion.transformer"), ("token_embedding", "text_tower.token_embedding"),
                             ("word_head.dense", "word_head.dense")):  # fmt: skip
            for name, tensor in model.encoders.head.get_submodule(ours).state_dict().items():
                assert torch.equal(tensor, weights[f"encoders.{theirs}.{name}"]), name


@pytest.mark.usefixtures("not_evaluated")
@pytest.mark.parametrize("row", ["vqa_albef", pytest.param("nlvr2_albef", marks=pytest.mark.slow)])
def test_a_run_goes_on_to_the_last_bit(row, finished, tmp_path):
    often = ("optim.steps=4", "run.save_every=2", "run.evaluate_every=2")
    config = config_of(row, *FEW, *often, f"start.run={finished[row].config.start.run}")

    def run(folder, resume=False):
        finetune(config, open_training_set(config.data, 0), RunFiles(folder), resume, Accelerator(cpu=True))
        return RunFiles(folder)

    unbroken = resumed_after(2, run, tmp_path)
    events = records(unbroken, "evaluate")
    assert [line["step"] for line in events] == [2, 4]
    final = json.loads(unbroken.validation.read_text())["validation"]
    assert final == {f"{config.data.task}_val": events[-1]["metrics"]}


@pytest.mark.parametrize("row", ["vqa_albef", "visual_entailment_albef", "nlvr2_albef"])
def test_batches_of_any_size_give_the_same_answers(row, finished):
    config, encoder = encoder_of(finished[row])
    items, task = open_test_sets(config.data)[f"{config.data.task}_test"], config.data.task
    more = (encoded_answers(encoder.tokenizer, [*items.answers]), 10) if task == "vqa" else ()
    answers, others = (
        predictions(SimpleNamespace(**{**vars(encoder), "batch_size": size}), items, task, *more) for size in (1, 5)
    )
    assert answers == others
    accuracy = finished[row].evaluations[f"{task}_test"]["metrics"]["accuracy"]  # in batches of 64
    hits = [
        vqa_score(items.answers[place], item["answers"]) if task == "vqa" else place == item["label"]
        for place, item in zip(answers, map(items.__getitem__, range(len(items))))
    ]
    assert accuracy == pytest.approx(sum(hits) / len(hits))


@pytest.mark.parametrize("task", ["vqa", "visual_entailment", "nlvr2"])
def test_an_oracle_is_always_right_and_a_constant_scores_its_share(task, monkeypatch):
    config = config_of(f"{task}_albef", *FEW, "data.num_test=24")
    items = open_test_sets(config.data)[f"{task}_test"]
    right = [items[index]["label"] for index in range(len(items))]
    words = WordTokenizer.from_words(["red"])
    encoder = SimpleNamespace(tokenizer=words, device="cpu", preprocessing={}, max_broken_share=0.01)
    for answers in (right, [right[0]] * len(right)):
        monkeypatch.setattr("geomm.evaluate_tasks.predictions", lambda *_, answers=answers: answers)
        result = evaluate_task(config, encoder, items)
        share = sum(one == other for one, other in zip(answers, right)) / len(right)
        assert result.metrics["accuracy"] == pytest.approx(share)
        assert max(right.count(label) for label in right) / len(right) == pytest.approx(result.chance["accuracy"])
        assert result.metrics.get("best attainable", 1.0) == 1.0


def test_attainable_and_by_chance_are_answers_of_the_closed_list():
    rows = [{"answers": [answer] * 10, "answer_type": "other"} for answer in ("owl", "owl", "owl", "red", "cat", "red")]
    result = vqa_evaluation([None, *["red"] * 5], rows, SimpleNamespace(answers=("cat", "red")), {})
    scores = result.metrics["accuracy"], result.metrics["best attainable"], result.chance["accuracy"]
    assert scores == pytest.approx((2 / 6, 3 / 6, 2 / 6))


def test_blank_and_exchanged_pictures_are_what_they_say(finished):
    data = config_of("nlvr2_albef", *FEW).data
    sets, blank = open_test_sets(data), open_test_sets(config_of("nlvr2_albef", *FEW, "data.blank=true").data)
    plain, exchanged = sets["nlvr2_test"][3], sets["nlvr2_exchanged"][3]
    assert (plain["images"][0] == exchanged["images"][1]).all()
    assert (plain["images"][1] == exchanged["images"][0]).all()
    assert plain["images"].any()
    assert all(not picture.any() for picture in blank["nlvr2_test"][3]["images"])
    assert plain["statement"] == blank["nlvr2_test"][3]["statement"] == exchanged["statement"]
    assert len({test_set.fingerprint for test_set in (*sets.values(), *blank.values())}) == 6
    training = open_training_set(config_of("vqa_albef", *FEW, "data.blank=true").data, 0)
    assert not training[0]["image"].any()
    view = open_task_training(config_of("vqa_albef", *FEW, "data.blank=true"), training, None).view
    assert not view.__getitems__([0, 1, 2]).images.any()


# -------------------------------------------------------------------------------- photographs


@pytest.mark.parametrize("task", ["vqa", "visual_entailment", "nlvr2"])
def test_files_of_annotations_are_trained_on_and_what_cannot_be_read_is_left_out(task, finished, tmp_path):
    for name in ("left.png", "right.png"):
        Image.new("RGB", (40, 30), (9, 90, 200)).save(tmp_path / name)
    (tmp_path / "cut.png").write_bytes((tmp_path / "left.png").read_bytes()[:60])
    annotation = {
        "vqa": {"question": "what is it", "answers": ["red"] * 7 + ["blue"] * 3, "answer_type": "other"},
        "visual_entailment": {"hypothesis": "it is red", "label": "neutral"},
        "nlvr2": {"sentence": "both are red", "label": "True"},
    }[task]
    pictures = [["left.png", "right.png"], ["right.png", "left.png"], ["left.png", "cut.png"]]
    rows = [annotation | ({"images": paths} if task == "nlvr2" else {"image": paths[1]}) for paths in pictures]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    (tmp_path / "answers.json").write_text(json.dumps([*"abcdefghij", "red"]))
    files = [f"data.{role}=rows.json" for role in ("train", "val", "test")] + ["data.source=karpathy"]
    files += [f"data.root={tmp_path}", "data.max_broken_share=1"] + ["data.answers=answers.json"] * (task == "vqa")
    few = ["optim.steps=1", "optim.warmup_steps=0", "optim.global_batch_size=2", "run.evaluate_every=0"]
    config = config_of(f"{task}_albef", *files, *few, f"start.run={finished[f'{task}_albef'].config.start.run}")
    run = RunFiles(tmp_path / "run")
    with warnings.catch_warnings(record=True) as caught:
        finetune(config, open_training_set(config.data, 0), run, False, Accelerator(cpu=True))
    lacks = "nlvr2-test: 2 of 2 rows have no identifier, so consistency is left out; expected in each"
    assert any(str(line.message).startswith(lacks) for line in caught) == (task == "nlvr2")
    result = json.loads(run.evaluation.read_text())["evaluations"][f"{task}_test"]
    hits = json.loads(run.hits.read_text())[f"{task}_test"]["accuracy"]
    assert any("1 of 3 pictures cannot be read and are left out" in str(line.message) for line in caught)
    assert (result["protocol"]["unreadable_images"], result["protocol"]["num_images"], len(hits)) == (1, 2, 2)
    assert result["metrics"]["accuracy"] == pytest.approx(sum(hit for (hit,) in hits) / 2)
    assert result["chance"]["accuracy"] == 1  # red, neutral, true: whoever says it is right about all


@pytest.mark.parametrize("row", ["vqa", "visual_entailment", "assigned", "nlvr2"])
def test_paper_scale_has_the_size_of_the_run_that_it_starts_from(row):
    config = config_of(f"{row}_albef_geo", scale="paper")
    tokenizer = SimpleNamespace(vocabulary_size=30_522, mask_id=103, end_id=102, pad_id=0)
    with torch.device("meta"):
        built, pre_trained = MODELS.build_model(config, tokenizer), build_encoders(config, tokenizer)
    layers = len(built.encoders.fusion.transformer.blocks)
    assert layers == (12 if row in ("assigned", "nlvr2") else 6)
    shapes = {name: tensor.shape for name, tensor in pre_trained.state_dict().items()}
    for name, tensor in built.encoders.text_tower.state_dict(prefix="text_tower.").items():
        assert shapes[name] == tensor.shape, name
    assert config.data.image_size == (256 if row == "assigned" else 384)


@pytest.mark.parametrize("scale", ["smoke", "demo", "photos", "paper"])
def test_text_assignment_can_be_trained_at_every_scale(scale):
    assert config_of("assigned_albef", scale=scale).run.evaluate_every == 0


# -------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("row", "overrides", "message"),
    [
        ("vqa_albef", ["model.text.width=16"], "data.task = vqa with model.image.width = 32, model.text.width = 16"),
        ("vqa_albef", ["data.source=tsv"], "data.source = tsv with data.task = vqa; expected: scenes, or karpathy"),
        ("vqa_albef", ["data.source=karpathy"], "data.answers = '' with data.task = vqa and data.source = karpathy"),
        ("nlvr2_albef", ["data.answers=a.json"], "data.answers = 'a.json' with data.task = nlvr2"),
        ("nlvr2_albef", ["data.task=dance"], "data.task = 'dance'; expected one of: vqa, visual_entailment"),
        ("vqa_albef", ["method.base=clip"], "method.base = clip with a task; expected: one with a fusion"),
        ("vqa_albef", ["method.two_views=true", "data.crop_scale=[0.5, 1]"], "two_views = true with a task, whose"),
        ("assigned_albef", ["run.evaluate_every=2"], "run.evaluate_every = 2 with data.task = text_assignment"),
        ("assigned_albef", ["optim.global_batch_size=2"], "global_batch_size = 2 with data.task = text_assignment"),
    ],
)
def test_what_does_not_fit_is_refused_by_key(row, overrides, message):
    with pytest.raises(ConfigError, match=message):
        config_of(row, *overrides)


def test_a_start_with_other_layers_is_refused(finished):
    tokenizer = encoder_of(finished["vqa_albef"])[1].tokenizer
    for row, override, message in (
        ("nlvr2_albef", "method.fusion_layers=3", "has 1 fusion layers, a fusion with two pictures 6; expected: a"),
        ("vqa_albef", "method.fusion_layers=2", "does not fit this row: no encoders.fusion.transformer.blocks.1"),
    ):
        config = config_of(row, *FEW, f"start.run={finished['vqa_albef'].config.start.run}", override)
        with pytest.raises(ConfigError, match=message):
            start_(MODELS.build_model(config, tokenizer), config)


def test_an_evaluation_refuses_the_others_checkpoints(finished):
    run, device = finished["vqa_albef"], torch.device("cpu")
    task, pairs = (last_checkpoint(one.checkpoints) for one in (run.files, RunFiles(ROOT / run.config.start.run)))
    refused(
        ("geomm/finetune.py, .*; run: python geomm/evaluate_tasks.py --", lambda: of_pairs.load_encoder(task, device)),
        ("geomm/train.py, .*; run: python geomm/evaluate.py --checkpoint", lambda: MODELS.load_encoder(pairs, device)),
        error=CheckpointError,
    )


def test_an_evaluation_on_another_task_is_refused(finished):
    checkpoint, device = last_checkpoint(finished["nlvr2_albef"].files.checkpoints), torch.device("cpu")
    with pytest.raises(ConfigError, match=r"data\.task would change what a trained model reads"):
        MODELS.load_encoder(checkpoint, device, ["data.task=visual_entailment"])


def test_what_no_accuracy_could_be_of_is_refused_before_the_training(tmp_path):
    Image.new("RGB", (20, 20)).save(tmp_path / "a.png")
    rows = [{"image": "a.png", "question": "what", "answers": ["cat"] * 10}]
    (tmp_path / "train.json").write_text(json.dumps(rows))
    (tmp_path / "answers.json").write_text(json.dumps(["dog", "owl"]))
    (tmp_path / "one.json").write_text(json.dumps([*rows, {**rows[0], "answers": "cat"}]))
    files = ["data.source=karpathy", f"data.root={tmp_path}", "data.train=train.json", "data.val=train.json",
             "data.test=one.json"]  # fmt: skip
    data = config_of("vqa_albef", *files, "data.answers=answers.json").data
    refused(
        (r"answers.json: none of its 2 answers \('dog', 'owl'\)", lambda: open_training_set(data, 0)),
        (r"data.test = one.json: 1 of 2 questions have one answer; expected: at least", lambda: open_test_sets(data)),
    )
    with pytest.raises(FileNotFoundError, match=r"train.json\+one.json: no such file"):  # VQA alone has two files
        open_training_set(config_of("nlvr2_albef", *files, "data.train=train.json+one.json").data, 0)
