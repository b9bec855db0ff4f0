"""common/run/utilisation.py: FLOPs against closed forms and published counts, peaks, and what the log says."""

import pytest
import torch
from torch import nn
from torchvision.models import ResNet50_Weights, ViT_B_16_Weights, resnet50, vit_b_16

from common.encoders.stem import Stem
from common.encoders.text import BidirectionalTextTransformer, CausalTextTransformer
from common.encoders.two_towers import TwoTowers
from common.encoders.vision import VisionTransformer
from common.geometry import Sphere
from common.logit_scale import LogitScale
from common.run.utilisation import Utilisation, gpu_peak, training_flops

WIDTH, LAYERS, HEADS, DIM, LENGTH = 64, 3, 4, 48, 16


def text_tower(**changes):
    return CausalTextTransformer(100, LENGTH, WIDTH, LAYERS, HEADS, DIM, end_id=99, **changes)


def image_tower(**changes):
    return VisionTransformer(32, 8, WIDTH, LAYERS, HEADS, DIM, **changes)


def token_ids(batch=1):
    return torch.full((batch, LENGTH), 99)


def text_flops(length, layers=LAYERS, last=None):
    """Closed form of a text tower: 6 x weights x tokens, and the two attention products, once more each backward.

    Of the last block `last` tokens come out (None = all): queries, keys and values are of all, the rest of those alone.
    """
    last = length if last is None else last
    products = WIDTH**2 * (12 * (layers - 1) * length + 3 * length + 9 * last)
    attention = 2 * 2 * WIDTH * ((layers - 1) * length**2 + last * length)
    projection = WIDTH * DIM  # of one token
    return 6 * (products + projection) + 3 * attention


def image_flops(tokens, last=1, patches=(32 // 8) ** 2):
    convolution = 2 * patches * WIDTH * 3 * 8 * 8
    # pixels want no gradient, so that the convolution has one product backward instead of two
    return text_flops(tokens, last=last) + 2 * convolution


# --- counting --------------------------------------------------------------------------------------------------------


def test_flops_of_a_transformer_are_six_times_weights_times_tokens_and_the_attention():
    batch = 5
    assert training_flops(text_tower(), token_ids(batch)) == batch * text_flops(LENGTH)
    bidirectional = BidirectionalTextTransformer(100, LENGTH, WIDTH, LAYERS, HEADS, DIM)
    assert training_flops(bidirectional, token_ids(batch)) == batch * text_flops(LENGTH, last=1)
    images, ids = torch.zeros(batch, 3, 32, 32), token_ids(batch)
    assert training_flops(image_tower(), images) == batch * image_flops(17)
    both = TwoTowers(image_tower(), text_tower(), Sphere(), LogitScale(10.0))
    assert training_flops(both, images, ids) == batch * (image_flops(17) + text_flops(LENGTH))


def test_more_class_tokens_cost_and_dropped_patches_save():
    images = torch.zeros(1, 3, 32, 32)
    several = training_flops(image_tower(num_class_tokens=4), images)
    assert several == image_flops(20, last=4) + 3 * 6 * WIDTH * DIM
    dropped = training_flops(image_tower(patch_dropout=0.5).eval(), images)  # counted as it trains
    assert dropped == image_flops(9, patches=8)


def test_frozen_weights_save_their_gradient():
    tower = text_tower()
    for parameter in tower.parameters():
        parameter.requires_grad_(False)
    tower.projection.requires_grad_(True)
    assert training_flops(tower, token_ids()) == (text_flops(LENGTH) - 6 * WIDTH * DIM) // 3 + 4 * WIDTH * DIM


def test_a_stem_that_was_computed_before_costs_nothing():
    tower = VisionTransformer(64, 32, WIDTH, LAYERS, HEADS, DIM, stem=Stem("tf_efficientnet_lite0", 64))
    model = nn.Sequential(nn.Identity(), nn.Sequential(tower))  # wherever it lies
    pixels, features = torch.zeros(2, 3, 64, 64), torch.zeros(2, tower.stem.channels, 2, 2)
    wanted = training_flops(tower, features)
    assert training_flops(model, pixels, once=[tower.stem]) == wanted < training_flops(model, pixels)


def test_gradient_checkpointing_computes_twice_and_counts_once():
    assert training_flops(text_tower(gradient_checkpointing=True), token_ids()) == text_flops(LENGTH)


@pytest.mark.parametrize(("build", "weights"), [(resnet50, ResNet50_Weights), (vit_b_16, ViT_B_16_Weights)])
def test_forward_flops_of_known_models_are_the_published_ones(build, weights):
    with torch.device("meta"):
        model = build()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.class_bias = nn.Parameter(torch.zeros(1, device="meta"))  # a gradient that costs nothing
    model.register_forward_hook(lambda module, inputs, output: output + module.class_bias)
    published = 2e9 * weights.IMAGENET1K_V1.meta["_ops"]  # given as multiply-adds
    assert training_flops(model, torch.zeros(1, 3, 224, 224)) == pytest.approx(published, rel=2e-3)


def test_counting_changes_neither_model_nor_random_state():
    model = image_tower(patch_dropout=0.5, gradient_checkpointing=True).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    training_flops(model, torch.zeros(1, 3, 32, 32))
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.training
    assert model.transformer.gradient_checkpointing
    for name, value in model.state_dict().items():
        assert value.device.type == "cpu"
        assert torch.equal(value, before[name])
    assert all(parameter.grad is None for parameter in model.parameters())


# --- peaks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312e12),
        ("NVIDIA A100 80GB PCIe", "tf32", 156e12),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4e12),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 165.2e12),
        ("Tesla V100-SXM2-16GB", "float16", 125e12),
        ("Tesla V100-SXM2-16GB", "bfloat16", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bfloat16", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bfloat16", None),
        ("AMD Instinct MI300X", "bfloat16", None),
    ],
)
def test_a_gpu_has_its_data_sheets_peak_or_none(name, precision, peak):
    assert gpu_peak(name, precision) == peak


# --- the figure in the log -------------------------------------------------------------------------------------------


def utilisation_on(monkeypatch, name, mixed_precision="bf16", processes=1, model=None):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
    device = torch.device("cpu" if name == "cpu" else "cuda")
    return Utilisation.of(model or text_tower(), (token_ids(3),), device, mixed_precision, processes)


def test_utilisation_is_the_work_of_the_samples_over_the_peak_of_all_processes(monkeypatch):
    one, two = (utilisation_on(monkeypatch, "NVIDIA H200", processes=processes) for processes in (1, 2))
    assert one == Utilisation(text_flops(LENGTH), 989.4e12)
    rate = 494.7e12 / text_flops(LENGTH)
    assert (one.share(rate), two.share(rate), one.share(0.0)) == (pytest.approx(0.5), pytest.approx(0.25), 0.0)


def test_tensor_cores_are_the_peak_of_float32_where_torch_uses_them(monkeypatch):
    for setting, peak in (("highest", 67e12), ("high", 494.7e12)):
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda setting=setting: setting)
        assert utilisation_on(monkeypatch, "NVIDIA H100 80GB HBM3", "no").peak_flops == peak


@pytest.mark.parametrize(("name", "mixed_precision"), [("Graphics X", "bf16"), ("cpu", "no"), ("NVIDIA H200", "fp8")])
def test_a_device_or_precision_without_a_known_peak_has_no_figure(monkeypatch, name, mixed_precision):
    assert utilisation_on(monkeypatch, name, mixed_precision) is None


def test_a_model_that_needs_values_has_no_figure_and_a_warning_says_why(monkeypatch):
    class NeedsValues(nn.Module):
        def forward(self, x):
            return x * x.max().item()

    with pytest.warns(UserWarning, match="model_flops_utilisation is not logged: .*meta"):
        assert utilisation_on(monkeypatch, "NVIDIA H200", model=NeedsValues()) is None
