"""The layout of the released checkpoints, filled with random numbers: counts, the same outputs, errors."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from refusals import refused
from torch import nn

from common.encoders.weights import WeightsError
from oblique_topology.released import from_released, load_released


class ReleasedText(nn.Module):
    """The text side as the released code names it."""

    def __init__(self, width, layers, heads):
        super().__init__()
        block = nn.TransformerEncoderLayer(width, heads, width * 4, dropout=0.0, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)


class ReleasedBlock(nn.Module):
    """A block of OpenAI's towers, with its names; MERU's text tower has it too."""

    def __init__(self, width, heads):
        super().__init__()
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(width, 4 * width), "c_proj": nn.Linear(4 * width, width)})

    def forward(self, x, mask=None):
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x))))


class ReleasedImage(nn.Module):
    def __init__(self, size, patch, width, layers, heads, dim, tokens):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, patch, patch, bias=False)
        self.class_embedding = nn.Parameter(torch.randn(tokens, width))
        self.positional_embedding = nn.Parameter(torch.randn((size // patch) ** 2 + tokens, width))
        self.ln_pre, self.ln_post = nn.LayerNorm(width), nn.LayerNorm(width)
        self.transformer = nn.Module()
        self.transformer.resblocks = nn.Sequential(*[ReleasedBlock(width, heads) for _ in range(layers)])
        self.proj = nn.Parameter(torch.randn(width, dim))


class Released(nn.Module):
    """What the released code builds, written from the specification, with names from its state dict."""

    def __init__(self, size, patch, width, layers, dim, tokens, context, words, text_width, text_layers):
        super().__init__()
        self.tokens = tokens
        self.visual = ReleasedImage(size, patch, width, layers, width // 64, dim, tokens)
        self.transformer = ReleasedText(text_width, text_layers, text_width // 64)
        self.token_embedding = nn.Embedding(words, text_width)
        self.positional_embedding = nn.Parameter(torch.randn(context + tokens - 1, text_width))
        self.ln_embedding, self.ln_final = nn.LayerNorm(text_width), nn.LayerNorm(text_width)
        self.text_projection = nn.Parameter(torch.randn(text_width, dim))
        self.logit_scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, images, ids, mask):
        """Sums of inner products, without the temperature, as the released forward returns them."""
        visual, tokens = self.visual, self.tokens
        x = visual.conv1(images).flatten(2).transpose(1, 2)
        x = torch.cat([visual.class_embedding.expand(len(x), -1, -1), x], dim=1) + visual.positional_embedding
        x = visual.ln_post(visual.transformer.resblocks(visual.ln_pre(x))[:, :tokens]) @ visual.proj
        ids = torch.cat([ids[:, :1].tile(1, tokens - 1), ids], dim=1)
        mask = torch.cat([mask[:, :1].tile(1, tokens - 1), mask], dim=1)
        y = self.ln_embedding(self.token_embedding(ids) + self.positional_embedding)
        y = self.transformer.encoder(y, src_key_padding_mask=~mask)
        y = self.ln_final(y)[:, :tokens] @ self.text_projection
        x, y = x / x.norm(dim=-1, keepdim=True), y / y.norm(dim=-1, keepdim=True)
        return torch.einsum("abd,cbd->ac", x, y)


HEADS = {"image": 2, "text": 1}  # of SMALL
SMALL = SimpleNamespace(
    size=32, patch=16, width=128, layers=2, context=9, words=200, text_width=64, text_layers=2
)  # fmt: skip
LARGE = SimpleNamespace(
    size=224, patch=16, width=768, layers=12, context=77, words=30_522, text_width=512, text_layers=12
)  # fmt: skip


def release(sizes, dim, tokens):
    model = Released(dim=dim, tokens=tokens, **vars(sizes)).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.parametrize(("dim", "tokens", "is_vector"), [(48, 1, False), (48, 1, True), (8, 6, False)])
def test_the_outputs_are_those_of_the_released_code(dim, tokens, is_vector):
    theirs = release(SMALL, dim, tokens)
    state = theirs.state_dict()
    if is_vector:
        state["visual.class_embedding"] = state["visual.class_embedding"][0]
    ours = from_released(state, heads=HEADS)
    images, ids = torch.randn(3, 3, 32, 32), torch.randint(103, 200, (4, 9))
    ids[:, 0] = 101
    for text, length in enumerate((9, 6, 3, 2)):
        ids[text, length - 1] = 102
        ids[text, length:] = 0
    with torch.no_grad():
        expected = theirs(images, ids, ids != 0)
        image_embeddings, text_embeddings, logit_scale = ours(images, ids)
    actual = ours.geometry.similarity(image_embeddings, text_embeddings)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert expected.std() > 0.001
    assert logit_scale.item() == pytest.approx(theirs.logit_scale.exp().item())
    assert ours.geometry.name == ("sphere" if tokens == 1 else "oblique")


@pytest.mark.parametrize(
    ("dim", "tokens", "total", "bound"), [(512, 1, 139_952_129, 100.0), (32, 16, 139_368_449, 3.95)]
)
def test_both_released_models_have_their_size_and_ours_has_a_place_for_every_tensor(dim, tokens, total, bound):
    with torch.device("meta"):
        theirs = Released(dim=dim, tokens=tokens, **vars(LARGE))
    assert sum(parameter.numel() for parameter in theirs.parameters()) == total
    ours = from_released({name: torch.empty_like(t, device="meta") for name, t in theirs.state_dict().items()})
    assert sum(parameter.numel() for parameter in ours.parameters()) == total
    assert ours.image_tower.image_size == 224
    assert ours.text_tower.context_length == 77
    assert ours.logit_scale.maximum == bound


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.module."])
def test_prefixes_of_wrappers_are_understood(prefix):
    state = release(SMALL, 8, 3).state_dict()
    ours = from_released({f"{prefix}{name}": value for name, value in state.items()}, heads=HEADS)
    assert all(map(torch.equal, ours.parameters(), from_released(state, heads=HEADS).parameters()))


@torch.no_grad()
def test_heads_of_a_small_model_are_stated():
    state = release(SMALL, 8, 3).state_dict()
    halved = from_released(state, heads={"image": 4, "text": 2})
    assert [tower.transformer.blocks[0].attention.heads for tower in (halved.image_tower, halved.text_tower)] == [4, 2]
    with pytest.raises(WeightsError, match=r"a file: the text tower's width 64 cannot be cut into 5 heads"):
        from_released(state, "a file", heads=HEADS | {"text": 5})


@pytest.mark.filterwarnings("ignore:Detected pickle protocol 4")
def test_a_file_is_read_without_running_anything(tmp_path):
    theirs = release(SMALL, 8, 3)
    torch.save(theirs.state_dict(), tmp_path / "released.pt")
    ours = load_released(tmp_path / "released.pt", HEADS)
    assert torch.equal(ours.image_tower.class_embedding, theirs.visual.class_embedding)
    torch.save({"a": Path("x")}, tmp_path / "code.pt")
    (tmp_path / "text.pt").write_text("weights\n")
    torch.save(theirs.state_dict(), tmp_path / "later.pt", pickle_protocol=4)
    for name, what in (
        ("code.pt", r"Unsupported global: GLOBAL \S+Path was not .*; expected tensors only"),
        ("later.pt", r"Unsupported operand 149; expected .* torch\.save \(pickle protocol 2\)"),
        ("text.pt", r"Unsupported operand \d+; expected .* a whole file"),
    ):
        with pytest.raises(WeightsError, match=rf"{name} cannot be read without executing code from it: {what}"):
            load_released(tmp_path / name)


def test_missing_foreign_and_misshapen_tensors_are_named():
    state = release(SMALL, 8, 3).state_dict()

    def read(changed):
        return lambda: from_released(changed, "a file", heads=HEADS)

    refused(
        (r"a file lacks visual\.ln_pre\.bias", read({n: t for n, t in state.items() if n != "visual.ln_pre.bias"})),
        (
            r"no released checkpoint of .* paper: it lacks visual\.class",
            read({"visual.conv1.weight": state["visual.conv1.weight"]}),
        ),
        (r"no place for: visual\.other", read({**state, "visual.other": torch.zeros(1)})),
        (
            r"a file: ln_final.bias has shape \(5,\), text_tower.final_norm.bias is \(64,\)",
            read({**state, "ln_final.bias": torch.zeros(5)}),
        ),
        error=WeightsError,
    )
